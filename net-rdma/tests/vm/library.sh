# A machine without libibverbs: the same binary runs over TCP, and says so to those who insist.
. ./common.sh
cluster /tmp/cluster.toml "$ADDRESS" "$ADDRESS"
node 0
node 2
node 1
wait_for 30 ./antelog tail --cluster "$ADDRESS:7411"
file 1
round_trip --cluster "$ADDRESS:7411"
grep "network: tcp: cannot load libibverbs" /tmp/node-1.log || fail "the reason for TCP is not named"
./antelog dev --transport rdma >/tmp/insist.log 2>&1 && fail "RDMA without a library"
[ "$(wc -l </tmp/insist.log)" = 1 ] || fail "not one line: $(cat /tmp/insist.log)"
cat /tmp/insist.log
./antelog doctor >/tmp/doctor.log
[ $? = 3 ] || fail "doctor: $(cat /tmp/doctor.log)"
grep "libibverbs" /tmp/doctor.log
echo "PASSED library: none there, and all goes over TCP"
