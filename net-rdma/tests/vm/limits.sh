# Too little memory may be locked, and libraries or devices that are named wrongly: one clear line each, or TCP.
. ./common.sh
cluster /tmp/cluster.toml "$ADDRESS" "$ADDRESS"
chmod 777 /tmp
# sh -c in the child, because the limit must bind somebody without privileges.
for wish in rdma auto; do
  sed "s/:74/:75/" /tmp/cluster.toml >/tmp/limited.toml
  su user -c "ulimit -l 64; exec ./antelog node --config /tmp/limited.toml --id 0 --transport $wish" >"/tmp/limited-$wish.log" 2>&1 &
  limited=$!
  if [ $wish = rdma ]; then
    wait $limited && fail "a node that insists on RDMA started without memory for it"
  else
    wait_for 20 grep -q "is up" "/tmp/limited-$wish.log"
    kill $limited
    wait $limited
  fi
done
su user -c "ulimit -l 64; exec ./antelog node --config /tmp/limited.toml --id 2 --transport rdma" >/tmp/memlock.log 2>&1 &&
  fail "a backup that insists on RDMA started without memory for it"
grep -q "RLIMIT_MEMLOCK" /tmp/memlock.log || fail "the limit is not named: $(cat /tmp/memlock.log)"
[ "$(grep -c . /tmp/memlock.log)" -ge 1 ] && tail -n 1 /tmp/memlock.log
for wrong in mlx9_0 "$DEVICE:2" "$DEVICE:1:99"; do
  ./antelog dev --listen 127.0.0.1:0 --transport rdma --rdma-device "$wrong" >/tmp/wrong.log 2>&1 && fail "device $wrong was taken"
  [ "$(wc -l </tmp/wrong.log)" = 1 ] || fail "not one line: $(cat /tmp/wrong.log)"
  cat /tmp/wrong.log
done
echo "PASSED limits"
