# The two images of meshgate.
#
#   docker build --target gateway -t meshgate-gateway .
#   docker build --target worker  -t meshgate-worker  .
#   docker build --target worker --build-arg BASE=pytorch/pytorch:2.7.1-cuda12.8-cudnn9-runtime -t trainer .
#
# BASE must hold Python 3.10 to 3.13 with pip, and the workers the same minor version as the gateway: what
# travels between them is pickled by the one and loaded by the other. Versions come from constraints.txt, so
# that the images hold what was tested. Both run as user 1000 with a read-only root filesystem and write to
# /home/meshgate and /tmp alone.
ARG BASE=python:3.11-slim

# --- what both images hold: a virtual environment with the dependencies, made before the sources are copied,
# --- so that a change in the sources rebuilds in seconds
FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv --system-site-packages /opt/meshgate
ENV PATH=/opt/meshgate/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt ./
# hatchling wants these to be there; the real ones come with the sources
RUN mkdir -p client/meshgate gateway/meshgate_gateway gateway/meshgate_wire gateway/meshgate_kubernetes \
      sync/meshgate_sync worker_image/meshgate_worker \
    && touch README.md LICENSE client/meshgate/__init__.py

FROM build AS gateway-build
RUN pip install -c constraints.txt '.[gateway]' && pip uninstall -q -y meshgate
COPY README.md LICENSE ./
COPY client client
COPY gateway gateway
COPY sync sync
COPY worker_image worker_image
RUN pip install --no-deps . && find /opt/meshgate -name tests -path '*/pyarrow/*' -prune -exec rm -rf {} +

FROM build AS worker-build
RUN pip install -c constraints.txt '.[worker]' && pip uninstall -q -y meshgate
COPY README.md LICENSE ./
COPY client client
COPY gateway gateway
COPY sync sync
COPY worker_image worker_image
RUN pip install --no-deps . && find /opt/meshgate -name tests -path '*/pyarrow/*' -prune -exec rm -rf {} +

FROM ${BASE} AS runtime
ENV PATH=/opt/meshgate/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/home/meshgate
RUN mkdir -p /home/meshgate && chown 1000:1000 /home/meshgate
USER 1000:1000
WORKDIR /home/meshgate

FROM runtime AS gateway
COPY --from=gateway-build /opt/meshgate /opt/meshgate
EXPOSE 8650
ENTRYPOINT ["python", "-m", "meshgate_gateway"]
CMD ["--host", "0.0.0.0", "--port", "8650"]

FROM runtime AS worker
COPY --from=worker-build /opt/meshgate /opt/meshgate
EXPOSE 26600
ENTRYPOINT ["python", "-m", "meshgate_worker"]
