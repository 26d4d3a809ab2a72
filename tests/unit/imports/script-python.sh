export SEED=3
exec python -u -X faulthandler main.py --seed ${SEED} <<< "yes"
