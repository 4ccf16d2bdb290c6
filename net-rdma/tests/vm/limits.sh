# Too little memory may be locked, and devices that are named wrongly: one clear line, or TCP where that is allowed.
. ./common.sh
chmod 777 /tmp
cluster /tmp/cluster.toml "$ADDRESS" "$ADDRESS"
# Without privileges, or the limit does not bind.
limited() {
  su user -c "ulimit -l 64; exec ./antelog node --config /tmp/cluster.toml --id $1 --transport $2" >"/tmp/limited-$1.log" 2>&1
}
limited 2 rdma && fail "a backup that insists on RDMA started without memory for it"
tail -n 1 /tmp/limited-2.log | grep "RLIMIT_MEMLOCK" || fail "the limit is not named"
for id in 0 2 1; do limited $id auto & done
wait_for 30 grep -q "is up" /tmp/limited-1.log
wait_for 30 ./antelog tail --cluster "$ADDRESS:7411"
file 1
round_trip --cluster "$ADDRESS:7411"
grep -q "over rdma" /tmp/limited-1.log && fail "RDMA without memory for it"
grep "RLIMIT_MEMLOCK" /tmp/limited-1.log || fail "the limit is not named"
killall antelog || fail "no node to end"
wait
for wrong in mlx9_0 "$DEVICE:2" "$DEVICE:1:99"; do
  ./antelog dev --listen 127.0.0.1:0 --transport rdma --rdma-device "$wrong" >/tmp/wrong.log 2>&1 && fail "device $wrong was taken"
  [ "$(wc -l </tmp/wrong.log)" = 1 ] || fail "not one line: $(cat /tmp/wrong.log)"
  cat /tmp/wrong.log
done
echo "PASSED limits: memory that may not be locked, devices that are not there"
