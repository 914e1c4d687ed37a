#!/usr/bin/env bash
# Build the images meridian/{router,ctxnode,gennode,clocksync,nats}:TAG from static binaries. Nothing is pulled: each image
# is FROM scratch and holds the binary, a state folder and /tmp. Usage: deploy/images.sh BIN_FOLDER [TAG]
set -euo pipefail

bin=${1:?folder of the binaries}
tag=${2:-latest}
uid=65532 # not root; owns the state folders

# image NAME ENTRYPOINT BINARY...
image() {
  local name=$1 entry=$2 dir
  shift 2
  dir=$(mktemp -d)
  mkdir -p "$dir/root/data" "$dir/root/traces" "$dir/root/kernel" "$dir/root/tmp"
  for b in "$@"; do cp "$bin/$b" "$dir/root/$b"; done
  chmod 0755 "$dir"/root/*
  chmod 1777 "$dir/root/tmp"
  chmod 0777 "$dir/root/kernel" # shared between processes: nonces that prove a shared kernel
  # docker import takes a tar as it is: it needs no base image and no BuildKit, and keeps owner and mode of the folders,
  # which named volumes inherit.
  tar -C "$dir/root" --owner=$uid --group=$uid --numeric-owner -c . |
    docker import --change "ENTRYPOINT [\"/$entry\"]" --change "USER $uid:$uid" --change 'WORKDIR /data' \
      --change 'ENV HOME=/data' - "meridian/$name:$tag" >/dev/null
  rm -rf "$dir"
  echo "meridian/$name:$tag"
}

image router router router timeline
image ctxnode ctxnode ctxnode
image gennode gennode gennode
image clocksync clocksync clocksync
image nats nats-server nats-server router # bin/router: its healthcheck subcommand asks the NATS monitor
