"""A network of test hosts on one machine, with links of a given rate.

    with Netlab(hosts=4, rate="1gbit") as network:
        subprocess.run(network.on("nl1", ["horovodrun", "-np", "4", "-H", network.slots(1), ...]))

`python -m tools.netlab` does the same from a shell. Both need root and Debian's iproute2.
"""

from tools.netlab.lab import Netlab, NetlabError, Network, Traffic, missing

__all__ = ["Netlab", "NetlabError", "Network", "Traffic", "missing"]
