# A backup is killed in the middle of being written to: its primary notices at once and survives, as do the others.
. ./common.sh
cluster /tmp/cluster.toml "$ADDRESS" "$ADDRESS"
node 0
node 2
backup=$started
node 1
primary=$started
wait_for 30 ./antelog tail --cluster "$ADDRESS:7411"
file 48
./antelog append --cluster "$ADDRESS:7411" --transport rdma --file /tmp/input --block 4096 >/tmp/append.log 2>&1 &
append=$!
wait_for 60 sh -c "grep -q '^shard-0.records [1-9][0-9][0-9]' /tmp/node-1.counters"
kill -KILL $backup
wait_for 10 grep -q "node 1: lost node 2" /tmp/node-1.log
sleep 1
kill -0 $primary || fail "the primary has ended: $(tail -n 3 /tmp/node-1.log)"
# The backup is dropped: appends and reading go on without it.
wait $append || fail "append: $(cat /tmp/append.log)"
./antelog read --cluster "$ADDRESS:7411" --raw 0 >/tmp/first || fail "reading does not go on"
head -c 4096 /tmp/input | cmp - /tmp/first || fail "what is read differs"
# A client is killed in the middle as well: nobody minds.
./antelog append --cluster "$ADDRESS:7411" --transport rdma --file /tmp/input --block 4096 >/tmp/append.log 2>&1 &
append=$!
sleep 1
kill -KILL $append
./antelog read --cluster "$ADDRESS:7411" --raw 0 >/tmp/first || fail "reading does not go on"
echo "PASSED killed: a backup and a client in the middle of writes"
