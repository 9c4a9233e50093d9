# docker build -t bmlab .                                                         CPU
# docker build -t bmlab --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 --build-arg TORCH="torch>=2.11" .   GPU
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH=torch==2.13.0
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 BMLAB_CACHE=/cache
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv python3-pip ca-certificates \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /venv
ENV PATH=/venv/bin:${PATH}
WORKDIR /bmlab
COPY . .
RUN pip install "${TORCH}" && pip install '.[dev]'
VOLUME /cache
EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser", "--allow-root"]
