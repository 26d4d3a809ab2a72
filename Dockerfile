# The image of all nodes: Python, the wheels, swarmtrain, and the user's Python files.
# `swarmtrain image build` prepares build/ and then builds this image without network. The classic builder of Docker is sufficient.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS wheels
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# A virtual environment, because Debian forbids pip to change its Python. Its path is the same with every base image.
RUN python3 -m venv /opt/venv && for packages in /opt/venv/lib/python3*/site-packages; do \
    echo "import site; site.addsitedir('/opt/extra${packages#/opt/venv}')" >"$packages/extra.pth"; done
ARG PIP_ARGS=""
ARG HASHES="--require-hashes"
COPY requirements/image.txt requirements/image.lock build/wheels* /wheels/
# For torch only the version is pinned, without hashes, because builds for different CUDA versions have the same version number.
RUN /opt/venv/bin/pip install --no-compile ${PIP_ARGS} ${HASHES} -r /wheels/image.lock \
    && /opt/venv/bin/pip install --no-compile ${PIP_ARGS} -c /wheels/image.txt torch
# Remove the tests of torch's C++ code, a tenth of the image.
RUN cd /opt/venv/lib/python3*/site-packages/torch && rm -rf test bin/test_* bin/*Test
# Compile all modules except tests, in parallel. With unchecked-hash, Python does not compare them with the source at each start.
RUN /opt/venv/bin/python -m compileall -qq -j 0 -x '/tests/|/testing/_internal/' --invalidation-mode unchecked-hash /opt/venv/lib

# The packages in the folder's requirements.txt, in a separate layer.
FROM wheels AS extra
ARG PIP_ARGS=""
COPY requirements/image.txt requirements.tx[t] build/extra* /extra/
RUN mkdir /opt/extra && if [ -e /extra/requirements.txt ]; then \
    /opt/venv/bin/pip install --prefix=/opt/extra --no-compile ${PIP_ARGS} --find-links=/extra -c /extra/image.txt -r /extra/requirements.txt \
    && /opt/venv/bin/python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/extra; fi

FROM ${BASE_IMAGE}
ENV PATH=/opt/venv/bin:/opt/extra/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN useradd --uid 1000 --user-group --create-home trainer && mkdir -m 1777 /workspace /workspace/runs
COPY --from=wheels /opt/venv /opt/venv
COPY --from=extra /opt/extra /opt/extra
COPY build/package/ /tmp/package/
RUN /opt/venv/bin/pip install --no-index --no-deps --no-cache-dir /tmp/package/*.whl
RUN mkdir -m 1777 /cache
USER trainer
WORKDIR /workspace
COPY --chown=trainer:trainer *.py ./
ENTRYPOINT ["python3", "-m", "swarmtrain.entrypoint"]
CMD ["node"]
