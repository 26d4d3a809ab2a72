OUT=/runs/a
mkdir -p $OUT
mpirun -n 4 -hostfile /job/hosts -x NCCL_IB_DISABLE=1 --mca btl ^openib python train.py --out $OUT --batch $((2 * 8)) &> $OUT/log
