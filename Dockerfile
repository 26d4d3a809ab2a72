# The image that every node runs: Python, the wheels, swarmtrain, and the user's two files.
# `swarmtrain image build` prepares build/ and then builds this without network; it needs nothing newer than the classic builder.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS wheels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# Beside the base's own Python, which Debian forbids pip to touch, and in the same place whatever the base is.
RUN python3 -m venv /opt/venv
ARG PIP_ARGS=""
COPY requirements/image.txt build/wheels* /wheels/
RUN /opt/venv/bin/pip install --no-compile ${PIP_ARGS} -r /wheels/image.txt
# Compiled once here, by all processors, and not checked against the source at each start; not what is only for tests.
RUN /opt/venv/bin/python -m compileall -qq -j 0 -x '/tests/|/testing/_internal/' --invalidation-mode unchecked-hash /opt/venv/lib

FROM ${BASE_IMAGE}
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN useradd --uid 1000 --user-group --create-home trainer && mkdir /workspace && chown trainer:trainer /workspace
COPY --from=wheels /opt/venv /opt/venv
COPY build/package/ /tmp/package/
RUN /opt/venv/bin/pip install --no-index --no-deps --no-cache-dir /tmp/package/*.whl
RUN mkdir -m 1777 /cache
USER trainer
WORKDIR /workspace
COPY --chown=trainer:trainer training_code.py datautils.py ./
ENTRYPOINT ["python3", "-m", "swarmtrain.entrypoint"]
CMD ["node"]
