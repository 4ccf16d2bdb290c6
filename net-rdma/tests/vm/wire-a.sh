# One of two machines on a wire that loses packets: the sequencer and the primary.
. ./common.sh
cluster /tmp/cluster.toml "$ADDRESS" "$PEER"
node 0 --transport rdma
sequencer=$started
node 1 --transport rdma
primary=$started
wait_for 90 [ -e /out/done ]
grep -q "node 1: node 2 at $PEER:7402 over rdma" /tmp/node-1.log || fail "the primary does not use RDMA"
kill $primary $sequencer
for node in $primary $sequencer; do wait "$node" || fail "a node ended with an error"; done
cat /sys/class/infiniband/"$DEVICE"/ports/1/hw_counters/completer_retry_err | sed 's/^/retries of this machine: /'
echo "PASSED wire: the machine with the primary"
