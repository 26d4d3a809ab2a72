# The image of all nodes: Python, its packages, swarmtrain, and the user's Python files.
# `swarmtrain image build` downloads the packages into build/, and serves them to this build at PIP_ARGS: no other network is reached,
# and no layer has the packages twice. Without PIP_ARGS, they come from pip's package index. Docker's classic builder is sufficient.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}
ENV PATH=/opt/venv/bin:/opt/extra/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN useradd --uid 1000 --user-group --create-home trainer && mkdir -m 1777 /workspace /workspace/runs /cache
COPY requirements/image.txt requirements/image.lock /opt/requirements/
ARG PIP_ARGS=""
ARG HASHES="--require-hashes"
# A digest of the names of the packages, which include the CUDA version of torch: others make another layer.
ARG PACKAGES=""
# A virtual environment, because Debian forbids pip to change its Python. Its path is the same with every base image.
# For torch only the version is pinned, without hashes, because builds for different CUDA versions have the same version number.
# The tests of torch's C++ code, a tenth of the image, are removed. All modules except tests are compiled, in parallel; with
# unchecked-hash, Python does not compare them with the source at each start.
RUN python3 -m venv /opt/venv && cd /opt/venv/lib/python3*/site-packages \
    && echo "import site; site.addsitedir('/opt/extra${PWD#/opt/venv}')" >extra.pth \
    && pip install --no-compile --no-cache-dir ${PIP_ARGS} ${HASHES} -r /opt/requirements/image.lock \
    && pip install --no-compile --no-cache-dir ${PIP_ARGS} -c /opt/requirements/image.txt torch \
    && rm -rf torch/test torch/bin/test_* torch/bin/*Test \
    && python3 -m compileall -qq -j 0 -x '/tests/|/testing/_internal/' --invalidation-mode unchecked-hash /opt/venv/lib
# The packages in the folder's requirements.txt, in a separate layer.
ARG EXTRA_PACKAGES=""
COPY requirements/image.txt requirements.tx[t] /opt/requirements/
RUN mkdir /opt/extra && if [ -e /opt/requirements/requirements.txt ]; then \
    pip install --prefix=/opt/extra --no-compile --no-cache-dir ${PIP_ARGS} -c /opt/requirements/image.txt -r /opt/requirements/requirements.txt \
    && python3 -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/extra; fi
COPY build/package/ /tmp/package/
RUN pip install --no-index --no-deps --no-cache-dir /tmp/package/*.whl
USER trainer
WORKDIR /workspace
COPY --chown=trainer:trainer *.py ./
ENTRYPOINT ["python3", "-m", "swarmtrain.entrypoint"]
CMD ["node"]
