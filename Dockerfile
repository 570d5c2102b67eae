# docker build -t miles .
# docker run --gpus all --ipc=host miles --help              (the arguments are train.py's)
# docker run --gpus all --ipc=host -it --entrypoint bash miles
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git libnuma1 make python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1

# The packages first: they change less often than the code.
WORKDIR /opt/miles
COPY requirements.txt requirements-gpu.txt constraints.txt ./
COPY scripts/sglang_wheel scripts/sglang_wheel
RUN pip install -r requirements-gpu.txt

COPY . .
RUN pip install -e .

ENTRYPOINT ["python", "/opt/miles/train.py"]
CMD ["--help"]
