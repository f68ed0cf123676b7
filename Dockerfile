# The installation of docs/tutorials/quick_start.md in an image. This build is not tested: we had no Docker engine.
#
#   docker build -t neuclip_ds .
#   docker run --gpus all --shm-size=8g -v $PWD/runs:/work/runs neuclip_ds train demo
#
# --shm-size holds the loaders' batches; `train RECIPE --dry-run` prints how much a run needs.
# torch's wheels bring CUDA; the host needs the NVIDIA driver and its container toolkit. For model.compile, add g++.
FROM python:3.12-slim

WORKDIR /opt/neuclip_ds
COPY . .
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN pip install --no-cache-dir -r requirements.txt && pip install --no-cache-dir --no-deps .

WORKDIR /work
ENTRYPOINT ["neuclip-ds"]
