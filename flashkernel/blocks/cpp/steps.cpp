// Runs prepared calls of other kernels one after the other, so that a decoding step costs the host one call.

#include <cstdint>

extern "C" {

struct Step {
    void (*run)(const void*);
    const void* arguments;
};

void run_steps(const Step* steps, int64_t count) {
    for (int64_t index = 0; index < count; index++) steps[index].run(steps[index].arguments);
}
}
