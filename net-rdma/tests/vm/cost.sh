# What replication costs the thread that does it: requests, doorbells and completions per record, and its system calls.
. ./common.sh
cluster /tmp/cluster.toml "$ADDRESS" "$ADDRESS"
node 0
node 2
# A thread for the shard and one for its gate; spinning, so that no system call is for sleep.
node 1 --set launch.mode=dedicated --set launch.idle=spin --set launch.force=true --set cluster.retention=recycle
primary=$started
wait_for 60 ./antelog tail --cluster "$ADDRESS:7411"
shard=$(grep -l antelog-0 /proc/$primary/task/*/comm | cut -d/ -f5)
file 32
# The backup is replica 1, which is peer 6 of its primary: five numbers are the sequencers'.
value() { counter /tmp/node-1.counters "shard-0.$1"; }
./antelog append --cluster "$ADDRESS:7411" --transport rdma --file /tmp/input --block 4096 >/tmp/append.log 2>&1 &
append=$!
# Tables have grown to their size by then.
wait_for 60 sh -c "grep -q '^shard-0.records [1-9][0-9][0-9][0-9]' /tmp/node-1.counters"
strace -c -p "$shard" -o /tmp/strace.log &
tracer=$!
wait $append || fail "append: $(cat /tmp/append.log)"
kill -INT $tracer
wait $tracer
sleep 1
records=$(value records)
echo "records replicated: $records"
for name in writes requests doorbells signalled completions inline full; do
  awk -v v="$(value rdma.peer-6.$name)" -v n="$records" -v name="$name" \
    'BEGIN { printf "to the backup: %-12s %6d  %.4f a record\n", name, v, v / n }'
done
echo "system calls of the replicating thread while most of the records went by:"
cat /tmp/strace.log
writes=$(value rdma.peer-6.writes)
[ $((writes * 16)) -le $((records * 2)) ] || fail "batches of less than eight records: nothing to be seen here"
[ $(($(value rdma.peer-6.signalled) * 16)) -le "$records" ] || fail "more than a signalled completion for 16 records"
[ $(($(value rdma.peer-6.doorbells) * 8)) -le "$records" ] || fail "more than a doorbell for 8 records"
# On this device in software the doorbell is a write to the device's file; on hardware it is none.
others=$(awk '$1 ~ /^[0-9.]+$/ && $NF != "write" && $NF != "total" { n += $4 } END { print n + 0 }' /tmp/strace.log)
[ "$others" -le 2 ] || fail "$others system calls other than the doorbell"
echo "PASSED cost: of the system calls all but $others are the doorbell"
