# One image for the router (`crossover`) and everything without a GPU around it (`loadtest`: the
# simulated server, sweeps, calibration). The SGLang servers have an image of their own.
#
#   docker build -t crossover-router .
#   docker run --rm -p 127.0.0.1:8000:8000 --read-only --tmpfs /tmp crossover-router \
#     serve --speculative http://HOST:31000 --baseline http://HOST:30000 --threshold 32
#   docker run --rm --entrypoint loadtest crossover-router engine --port 31000 --role speculative
#
# It builds without BuildKit too, so there is nothing here that only BuildKit knows.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
# Copied and not linked by the venv, so that the interpreter's own path is the only thing that the
# two stages have to have in common. pip stays behind: what runs needs none.
RUN python3 -m venv --without-pip /opt/crossover && python3 -m venv /build/tools
COPY requirements/run.txt requirements/run.txt
# A layer of its own, since the pins change less often than the code.
RUN /build/tools/bin/pip --python /opt/crossover/bin/python install \
      --no-cache-dir --disable-pip-version-check --no-compile -r requirements/run.txt
COPY pyproject.toml README.md LICENSE ./
COPY router router
COPY loadtest loadtest
# The servers' flags, which are part of the package, and the programs of compose.yaml.
COPY deploy deploy
RUN /build/tools/bin/pip --python /opt/crossover/bin/python install \
      --no-cache-dir --disable-pip-version-check --no-compile --no-deps . \
 && /opt/crossover/bin/python -m compileall -q /opt/crossover/lib
# Whatever the checkout's umask was: readable for all, writable for nobody but root.
RUN install -d /opt/crossover/share \
 && cp deploy/compose/healthcheck.py deploy/compose/prepare.py /opt/crossover/share/ \
 && chmod -R u+rwX,go+rX,go-w /opt/crossover

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Crossover" \
      org.opencontainers.image.description="An OpenAI-compatible proxy that sends each request to the speculative or the baseline SGLang server, whichever serves it best." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# A number that no distribution gives away, so that it is nobody else on the host. Its group reads
# the key that the services of compose.yaml share.
RUN groupadd --gid 10001 crossover \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin crossover \
 && install -d -o 10001 -g 10001 -m 0750 /run/crossover /calibration /gpu
COPY --from=build /opt/crossover /opt/crossover
# Inside a container only the public listener is for others; the admin listener stays on loopback
# until somebody gives it a key.
ENV PATH=/opt/crossover/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    CROSSOVER_HOST=0.0.0.0
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 9400
STOPSIGNAL SIGTERM
# Whether the router (or the simulated server, if that is what runs) answers, not whether a server
# is left behind it: that says /ready, and no restart of this container mends it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s --retries=3 \
  CMD ["python", "-I", "/opt/crossover/share/healthcheck.py"]
# Exec form: the router is process 1 and gets SIGTERM itself.
ENTRYPOINT ["crossover"]
CMD ["serve"]
