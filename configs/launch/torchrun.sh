#!/bin/bash
# One node's share of a run over several nodes. Start it on every node, from the same folder:
#   NODES=2 HEAD=node1 configs/launch/torchrun.sh configs/gpt-124m.yaml [key.path=value ...]
# NODES      nodes that must come, or 1:4 for at least 1 and at most 4
# HEAD       name or address of the node that hosts the rendezvous: one of them
# PORT       its port, free there (29400)
# RUN_ID     the same on all nodes of a run, another for another run (shardmuon)
# RANKS      processes on this node, one for each GPU by default (gpu)
# RESTARTS   how often workers may fail and be started again (3)
# LOCAL_ADDR address of this node, where its host name does not lead to it
# RDZV_CONF  settings of the rendezvous; docs/multi-node.md explains these
set -euo pipefail
: "${NODES:?how many nodes, such as 2 or 1:4}" "${HEAD:?the node that hosts the rendezvous}"

# torch 2.13 hands restarted workers the store of the failed ones, where they read dead addresses.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# With several networks, name the one to use; checkpoints go over gloo on GPUs too.
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "${RANKS:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${RUN_ID:-shardmuon}" \
    --rdzv-conf "${RDZV_CONF:-join_timeout=600,last_call_timeout=30}" \
    ${LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"} \
    --max-restarts "${RESTARTS:-3}" \
    --signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout 300 \
    train.py "$@"
