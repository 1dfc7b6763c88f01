# Build mars-ray with its dependencies, for CPUs or for CUDA (torch's wheels on PyPI are for CUDA):
#   docker build --tag mars-ray:0.1.0 .
#   docker build --tag mars-ray:0.1.0-cuda --build-arg TORCH_INDEX_URL=https://pypi.org/simple .
# The content behind an image name may change. For repeatable builds append its digest to the name
# (debian:bookworm-slim@sha256:..., see `docker buildx imagetools inspect debian:bookworm-slim`).
FROM debian:bookworm-slim

# The package is built with the engine's kernels for every processor of the image's architecture.
# tini is the first process, and reaps orphaned processes.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv tini \
 && rm -rf /var/lib/apt/lists/*

RUN useradd --uid 1000 --create-home --shell /bin/bash mars \
 && install --directory --owner mars --group mars /etc/mars-ray

RUN python3 -m venv /opt/mars-ray
ENV PATH=/opt/mars-ray/bin:$PATH

# Index of torch's CPU wheel. It is used for torch alone, because a second index could answer for any package.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /opt/mars-ray/source
COPY constraints.txt ./
# Large and rarely changing packages come first, in their own layer.
RUN pip install --no-cache-dir --no-deps --constraint constraints.txt --index-url "$TORCH_INDEX_URL" torch
RUN pip install --no-cache-dir --constraint constraints.txt torch 'ray[data,serve,train]'
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY mars_ray ./mars_ray
COPY serve_configs ./serve_configs
RUN PIP_CONSTRAINT=constraints.txt pip install --no-cache-dir '.[abfs,gs,s3,traces]'

USER mars
WORKDIR /home/mars
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --start-period=300s --retries=3 \
 CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=8)"]
ENTRYPOINT ["tini", "--"]
CMD ["mars-ray", "serve", "--config", "/opt/mars-ray/source/serve_configs/container.yaml"]
