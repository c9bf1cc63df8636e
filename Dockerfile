# CPU:  docker build -t gear-offline .
# GPU:  docker build -t gear-offline:cuda --build-arg BACKEND=cu130 --build-arg EXTRAS=mujoco,minari,gpu .
#       docker run --gpus all --shm-size 16g -v "$PWD:/work" gear-offline:cuda train hopper-medium
FROM python:3.12-slim
ARG BACKEND=cpu
ARG EXTRAS=mujoco,minari
# a C compiler: torch.compile builds the launchers of its kernels
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv
COPY . /src
RUN uv pip install --system --no-cache --torch-backend "$BACKEND" --constraint /src/constraints.txt "/src[$EXTRAS]" \
  && rm -rf /src
WORKDIR /work
ENTRYPOINT ["gear-offline"]
CMD ["--help"]
