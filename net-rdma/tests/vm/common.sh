# What the scenarios in the emulated machine share; sourced by them. POSIX shell, because that is what is there.

fail() {
  echo "FAILED $*"
  for log in /tmp/*.log; do [ -e "$log" ] && echo "-- $log" && tail -n 15 "$log"; done
  exit 1
}

# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
  left=$(($1 * 5))
  shift
  until "$@" >/dev/null 2>&1; do
    left=$((left - 1))
    [ $left -gt 0 ] || fail "waited in vain for: $*"
    sleep 0.2
  done
}

# cluster FILE ADDRESS BACKUP_ADDRESS: one shard with a backup, and a sequencer.
cluster() {
  cat >"$1" <<END
[cluster]
name = "vm"
region_bytes = 67108864
client_ring_bytes = 1048576
record_bytes_max = 65536
clients_max = 8
suspect_ms = 2000
lost_grace_ms = 2000
tick_us = 5000
[launch]
rdma_ack_timeout = 16
[[shard]]
id = 0
[[node]]
id = 0
role = "sequencer"
listen = "$2:7400"
[[node]]
id = 1
role = "primary"
shard = 0
clients = "$2:7411"
[[node]]
id = 2
role = "backup"
shard = 0
listen = "$3:7402"
clients = "$3:7412"
END
}

# node ID [ARGS...]: starts a node of /tmp/cluster.toml in the background; its process is $started, its log /tmp/node-ID.log.
node() {
  id=$1
  shift
  ./antelog node --config /tmp/cluster.toml --id "$id" --counters "/tmp/node-$id.counters" "$@" >"/tmp/node-$id.log" 2>&1 &
  started=$!
}

# counter FILE NAME
counter() {
  sed -n "s/^$2 //p" "$1"
}

# file MIB: bytes without a pattern in /tmp/input.
file() {
  dd if=/dev/urandom of=/tmp/input bs=1M count="$1" 2>/dev/null
}

# round_trip [ARGS...]: appends /tmp/input, reads the log back and compares.
round_trip() {
  ./antelog append "$@" --file /tmp/input --block 4096 --json >/tmp/append.log 2>&1 || fail "append: $(cat /tmp/append.log)"
  ./antelog subscribe "$@" --raw --to-tail >/tmp/output 2>/tmp/subscribe.log || fail "subscribe: $(cat /tmp/subscribe.log)"
  cmp /tmp/input /tmp/output || fail "what came back differs"
}
