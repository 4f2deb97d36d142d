# CPU:   docker build -t areal-jax . && docker run --rm areal-jax
# CUDA:  docker build -t areal-jax:cuda --target cuda . && docker run --rm --gpus all areal-jax:cuda
# The wheels of JAX bring CUDA; the host needs the driver and the NVIDIA container toolkit.
FROM python:3.11-slim AS source
ENV PIP_NO_CACHE_DIR=1
WORKDIR /areal_jax
COPY . .

FROM source AS cuda
RUN python -m pip install -e ".[gpu]"
CMD ["areal-train", "--exp=aime"]

FROM source AS cpu
RUN python -m pip install -e .
CMD ["areal-train", "--exp=aime"]
