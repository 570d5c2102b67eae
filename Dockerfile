# docker build -t miles .
# docker run --gpus all --ipc=host miles --help              (the arguments are train.py's)
# docs/getting-started/docker.md says the rest.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# Without versions: Ubuntu's archive keeps the newest ones alone, so that a pinned one could not be had tomorrow.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        build-essential git libnuma1 make ninja-build python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1

# The packages first: they change less often than the code.
WORKDIR /opt/miles
COPY requirements.txt requirements-gpu.txt requirements-te.txt constraints.txt ./
COPY scripts/sglang_wheel scripts/sglang_wheel
RUN pip install -r requirements-gpu.txt
# A layer of its own: its extension for PyTorch is compiled here, against the torch that is there.
# hadolint ignore=DL3059
RUN MAX_JOBS=8 NVTE_FRAMEWORK=pytorch pip install --no-deps --no-build-isolation -r requirements-te.txt

COPY . .
RUN pip install -e . && python -m compileall -q miles scripts

# Any user may run it (docker run --user): what programs write by themselves goes where everybody may write.
RUN mkdir -m 1777 /home/miles /workspace
ENV HOME=/home/miles USER=miles
WORKDIR /workspace

ENTRYPOINT ["python", "/opt/miles/train.py"]
CMD ["--help"]
