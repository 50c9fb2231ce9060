// Runs prepared calls of other kernels one after the other on one team of threads, so that a decoding step costs the host
// one call, and starts and ends the team once.

#include <cstdint>

extern "C" {

struct Step {
    void (*run)(const void*);  // called by all threads of the team
    const void* arguments;
};

void run_steps(const Step* steps, int64_t count, int threads) {
#pragma omp parallel num_threads(threads)
    for (int64_t index = 0; index < count; index++) {
        steps[index].run(steps[index].arguments);
#pragma omp barrier
    }
}
}
