# All that is tested in one machine, in this order: the device alone, the transport, whole clusters, and what goes wrong.
step() {
  echo "== $1"
  start=$(cut -d. -f1 /proc/uptime)
  shift
  "$@" || { echo "FAILED $*"; exit 1; }
  echo "   took $(($(cut -d. -f1 /proc/uptime) - start)) s"
}
# Between two scenarios nothing is left running.
scenario() {
  step "$1" sh "$1"
  killall antelog 2>/dev/null
  rm -f /tmp/*.log /tmp/*.counters
}
step "device" ./device --test-threads=1
[ ! -x ./independent ] || step "an independent peer" env ANTELOG_TEST_PEER=./independent ./peer
step "the transport's contract" ./contract --test-threads=1 over_a_real_device
export TEST_BINARY=/app/antelog TEST_ENVIRONMENT="ANTELOG_TRANSPORT=rdma ANTELOG_CLUSTER_REGION_BYTES=134217728"
step "round trips over RDMA" ./round_trip --test-threads=1
step "the demo, a process for each node" ./antelog demo --transport rdma --processes --seconds 9 --repetitions 1 \
  --rate 200 --compute-ms 15 --set cluster.tick_us=10000 --set cluster.suspect_ms=5000 --set cluster.lost_grace_ms=5000
step "the floor" ./antelog profile floor --transport rdma --seconds 0.5
# To compare with: perftest's half of a round trip between two processes.
ib_write_lat -d "$DEVICE" -s 4160 -n 1000 >/dev/null 2>&1 &
sleep 2
ib_write_lat -d "$DEVICE" -s 4160 -n 1000 "$ADDRESS" | tail -n 3
step "doctor" ./antelog doctor
scenario cost.sh
scenario killed.sh
scenario limits.sh
scenario removed.sh
