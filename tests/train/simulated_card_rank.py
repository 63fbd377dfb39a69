"""A training process of ``memfit run`` whose card is simulated: it computes on the CPU, and says another name.

torchrun … -m tests.train.simulated_card_rank OPTIONS NAME…    NAME is the card of each rank
"""

import os
import sys

from memfit.train.launch import worker
from memfit.train.launch.rank_cards import RankCard
from memfit.train.launch.rank_entry import leave
from memfit.train.run_options import RunOptions


def main():
    name = sys.argv[2 + int(os.environ["RANK"])]
    worker.card_of = lambda device: RankCard(name=name, total_bytes=24 << 30)
    leave(worker.main(RunOptions.from_json(sys.argv[1])))


if __name__ == "__main__":
    main()
