#!/usr/bin/env bash
# This machine as a Slurm cluster of NODES nodes, for the time of one command. Everything is in
# namespaces of its own, so ports and names clash with nothing, and it all ends with the command.
#
#   slurm_cluster.sh FOLDER NODES COMMAND...
#
# FOLDER is empty and belongs to root, who runs this; node1, node2 ... have NODE_GPUS (1) made-up
# GPUs each.
set -euo pipefail

if [ -z "${IN_SLURM_CLUSTER:-}" ]; then
  export IN_SLURM_CLUSTER=1
  exec unshare --mount --net --uts --pid --fork --kill-child --mount-proc bash "$0" "$@"
fi
folder="$1" nodes="$2" gpus="${NODE_GPUS:-1}"
shift 2

# Slurm's sockets have paths of at most 108 characters.
mount --bind "$folder" /mnt
folder=/mnt

hostname slurmhost
ip link set lo up
cp /etc/hosts "$folder/hosts"
echo "10.77.0.1 slurmhost" >>"$folder/hosts"
# Addresses outside 127.0.0.0/8: names are not resolved where there is no other.
for ((node = 1; node <= nodes; node++)); do
  ip address add "10.77.0.$node/32" dev lo
  echo "10.77.0.$node node$node" >>"$folder/hosts"
done
mount --bind "$folder/hosts" /etc/hosts

head --bytes=1024 /dev/urandom >"$folder/munge.key"
chmod 400 "$folder/munge.key"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
  --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"

mkdir "$folder/state" "$folder/spool"
cat >"$folder/slurm.conf" <<CONF
ClusterName=tests
SlurmctldHost=slurmhost(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmdLogFile=$folder/slurmd.%n.log
SlurmdSpoolDir=$folder/spool/%n
StateSaveLocation=$folder/state
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[1-$nodes] NodeHostname=slurmhost NodeAddr=10.77.0.[1-$nodes] Port=[26901-$((26900 + nodes))] CPUs=2 RealMemory=2000 Gres=gpu:$gpus State=UNKNOWN
PartitionName=debug Nodes=node[1-$nodes] Default=YES State=UP
CONF
for ((gpu = 0; gpu < gpus; gpu++)); do mknod "$folder/gpu$gpu" c 1 3; done
echo "NodeName=node[1-$nodes] Name=gpu File=$folder/gpu[0-$((gpus - 1))]" >"$folder/gres.conf"
export SLURM_CONF="$folder/slurm.conf"
slurmctld
for ((node = 1; node <= nodes; node++)); do slurmd -N "node$node"; done
deadline=$((SECONDS + 120))
until [ "$(sinfo --noheader --Node --format=%T | grep --count '^idle$')" -eq "$nodes" ]; do
  if ((SECONDS > deadline)); then
    sinfo --Node --long >&2
    exit 1
  fi
  sleep 0.2
done
"$@"
