# The two images of meshgate.
#
#   docker build --target gateway -t meshgate-gateway .
#   docker build --target worker  -t meshgate-worker  .
#   docker build --target worker --build-arg BASE=pytorch/pytorch:2.7.1-cuda12.8-cudnn9-runtime -t trainer .
#
# BASE must contain Python 3.10 to 3.13 with pip and venv. Workers need the same minor version as the gateway, because
# they exchange pickles. Versions come from constraints.txt, so the images contain what was tested. Both images run as
# user 1000 with a read-only root filesystem and write only to /home/meshgate and /tmp. A change in the sources rebuilds
# only the last, small layer.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/meshgate/bin:$PATH
# Packages installed in BASE, such as torch, stay importable.
RUN python3 -m venv --system-site-packages /opt/meshgate
WORKDIR /src
COPY pyproject.toml constraints.txt ./
# hatchling needs these files; the real ones come with the sources.
RUN for package in client/meshgate gateway/meshgate_gateway clusters/meshgate_kubernetes \
      clusters/meshgate_slurm wire/meshgate_wire wire/meshgate_processes \
      sync/meshgate_sync worker_image/meshgate_worker; do mkdir -p $package && touch $package/__init__.py; done \
    && touch README.md LICENSE

FROM build AS gateway-dependencies
RUN pip install -c constraints.txt '.[gateway]' && pip uninstall -q -y meshgate \
    && find /opt/meshgate -path '*/pyarrow/tests' -prune -exec rm -rf {} +

FROM build AS worker-dependencies
# 240 MB that no worker uses: only the laptop and the gateway use the Kubernetes API and what that depends on, only the
# queries of Monarch's telemetry, which the gateway answers, use pyarrow, and monarch-tui is for terminals.
RUN pip install -c constraints.txt '.[worker]' \
    && pip uninstall -q -y meshgate kubernetes pyarrow setuptools \
      aiohttp aiohttp-retry aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl \
      durationpy oauthlib requests-oauthlib websocket-client \
    && rm -rf /opt/meshgate/bin/monarch-tui /opt/meshgate/lib/python3*/site-packages/tests

FROM build AS wheel
COPY README.md LICENSE ./
COPY client client
COPY gateway gateway
COPY clusters clusters
COPY sync sync
COPY wire wire
COPY worker_image worker_image
RUN pip wheel -c constraints.txt --no-deps --wheel-dir /wheel .

FROM ${BASE} AS runtime
ENV PATH=/opt/meshgate/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/home/meshgate
RUN mkdir -p /home/meshgate && chown 1000:1000 /home/meshgate
# The standard library of the official images of Python has no bytecode, and the user of these images may not write any:
# each process would compile what it imports, for up to 0.8 s of CPU time. Does nothing if there is bytecode.
RUN python3 -m compileall -q -x '/(site|dist)-packages/|/(tests?|idlelib|lib2to3|tkinter|turtledemo)/' \
      "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"

FROM runtime AS gateway
COPY --from=gateway-dependencies /opt/meshgate /opt/meshgate
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir --no-deps --no-index /wheel/meshgate-*.whl && rm -r /wheel
USER 1000:1000
WORKDIR /home/meshgate
EXPOSE 8650
ENTRYPOINT ["python", "-m", "meshgate_gateway"]
CMD ["--host", "0.0.0.0", "--port", "8650"]

FROM runtime AS worker
COPY --from=worker-dependencies /opt/meshgate /opt/meshgate
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir --no-deps --no-index /wheel/meshgate-*.whl && rm -r /wheel
USER 1000:1000
WORKDIR /home/meshgate
EXPOSE 26600
ENTRYPOINT ["python", "-m", "meshgate_worker"]
