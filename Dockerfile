# The environment of the tests, with JupyterLab; models and texts that are fetched stay in the volume /cache.
#   docker build -t bmlab .
#   docker run --rm -p 8888:8888 -v bmlab-cache:/cache bmlab                 # it prints the address; with a GPU: --gpus all
# torch's wheel brings CUDA along; another one: --build-arg TORCH=<requirement or address of a wheel>; another base: --build-arg BASE=ubuntu:24.04
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH=torch==2.13.0
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 BMLAB_CACHE=/cache
# Triton and torch.compile call a C++ compiler
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv python3-dev g++ make ca-certificates \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:${PATH}
WORKDIR /bmlab
COPY . .
RUN pip install "${TORCH}" && grep -vE '^(torch|triton)==' constraints.txt > /tmp/constraints.txt && pip install -c /tmp/constraints.txt -e '.[dev]'
VOLUME /cache
EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "--allow-root"]
