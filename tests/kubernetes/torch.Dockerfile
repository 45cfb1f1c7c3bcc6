# The worker image with torch, for tests: pods reach no package registry. Torch's CPU build is enough, which PyPI does
# not have for Linux: set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, or PIP_FIND_LINKS.
ARG WORKER
FROM ${WORKER}
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
USER root
RUN pip install --no-cache-dir 'torch==2.13.0'
USER 1000:1000
