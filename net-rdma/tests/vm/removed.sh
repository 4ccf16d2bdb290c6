# A device is removed under load: everything goes on over TCP, and nothing is lost.
. ./common.sh
cluster /tmp/cluster.toml "$ADDRESS" "$ADDRESS"
node 0
sequencer=$started
node 2
backup=$started
node 1
primary=$started
wait_for 30 grep -q "over rdma" /tmp/node-1.log
wait_for 30 ./antelog tail --cluster "$ADDRESS:7411"
file 24
./antelog append --cluster "$ADDRESS:7411" --transport auto --file /tmp/input --block 4096 --json >/tmp/append.log 2>&1 &
append=$!
wait_for 60 sh -c "grep -q '^shard-0.records [1-9][0-9][0-9]' /tmp/node-1.counters"
grep -q "over rdma" /tmp/append.log || fail "the client does not use RDMA: $(cat /tmp/append.log)"
rdma link delete "$DEVICE" || fail "the device cannot be removed"
[ ! -e "/sys/class/infiniband/$DEVICE" ] || fail "the device is still there"
wait $append || fail "append: $(cat /tmp/append.log)"
grep -q '"records":6144' /tmp/append.log || fail "not all was acknowledged: $(cat /tmp/append.log)"
for id in 0 1 2; do
  grep -q "rdma is off from here on: RDMA device $DEVICE was removed" "/tmp/node-$id.log" || fail "node $id says nothing"
done
grep -q "node 1: node 2 at .* over tcp: the call.* cannot use RDMA: RDMA device $DEVICE was removed" /tmp/node-1.log ||
  fail "the primary does not say that it goes on over TCP"
./antelog subscribe --cluster "$ADDRESS:7411" --raw --to-tail >/tmp/output || fail "subscribe"
cmp /tmp/input /tmp/output || fail "what came back differs"
kill $primary $backup $sequencer
for node in $primary $backup $sequencer; do wait "$node" || fail "a node ended with an error"; done
rdma link add "$DEVICE" type rxe netdev dummy0
echo "PASSED removed: the device under load; all 6144 records are there"
