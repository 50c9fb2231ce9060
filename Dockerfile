# The server: docker build -t flashkernel . && docker run --gpus all -p 8000:8000 -v flashkernel-cache:/cache flashkernel
# The steps are those of tools/install_server.sh, which CI runs as well.
FROM python:3.12-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1 \
    FLASHKERNEL_CACHE_DIR=/cache/flashkernel \
    TRITON_CACHE_DIR=/cache/triton \
    HF_HOME=/cache/huggingface

WORKDIR /opt/flashkernel
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tools/install_server.sh tools/install_server.sh
COPY flashkernel flashkernel
RUN sh tools/install_server.sh system \
    && useradd --create-home --uid 1000 server \
    && mkdir -p /cache \
    && chown server:server /cache

USER 1000
VOLUME ["/cache"]
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=180s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["flashkernel", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["smollm2"]
