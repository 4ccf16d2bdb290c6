# The other of two machines on a wire that loses packets: the backup, and a client.
. ./common.sh
cluster /tmp/cluster.toml "$PEER" "$ADDRESS"
node 2 --transport rdma
backup=$started
wait_for 60 ./antelog tail --cluster "$PEER:7411" --transport rdma
file 2
round_trip --cluster "$PEER:7411" --transport rdma
grep -q "gate $PEER:7411 over rdma" /tmp/append.log || fail "the client does not use RDMA: $(cat /tmp/append.log)"
touch /out/done
kill $backup
wait $backup || fail "the backup ended with an error"
echo "PASSED wire: 2 MiB through a primary, a backup and back, between two machines"
