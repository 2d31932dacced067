# trainkit on NVIDIA GPUs; the host needs NVIDIA's driver and its container toolkit.
#
#   docker build -t trainkit .
#   docker run --rm -it --gpus all --ipc host -v "$PWD:/data" trainkit doctor
#   docker run --rm -it --gpus all --ipc host -v "$PWD:/data" trainkit launch --config my.yaml
#
# Runs land in train_model/ of the mounted directory, models of the hub in .cache/huggingface there.
# `--user "$(id -u):$(id -g)"` lets the files belong to you.
#
# torch brings the CUDA libraries that it computes with. The base has nvcc besides, which DeepSpeed
# needs to compile its offloading optimizer, and Triton needs a C compiler.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04

# hadolint ignore=DL3006
FROM ${BASE} AS system
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/trainkit PATH=/opt/trainkit/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3 -m venv "$VIRTUAL_ENV"

FROM system AS build
WORKDIR /source
COPY pyproject.toml README.md constraints.txt ./
COPY trainkit trainkit
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM system
# The versions that the tests ran with. `--build-arg EXTRAS=qlora` takes fewer of the extras.
ARG EXTRAS=qlora,eval,export,tracking
COPY constraints.txt /opt/trainkit/constraints.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --constraint /opt/trainkit/constraints.txt "$(echo /wheels/*.whl)[${EXTRAS}]" \
    && trainkit --version
ENV HOME=/data HF_HOME=/data/.cache/huggingface TRITON_CACHE_DIR=/tmp/triton
WORKDIR /data
RUN chmod 1777 /data
USER 1000:1000
ENTRYPOINT ["trainkit"]
CMD ["--help"]
