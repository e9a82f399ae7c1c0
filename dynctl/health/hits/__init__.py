"""Why the prefix hit rate is what it is: the ladder of hits, from the records of routers.

One pass over the records (:mod:`dynctl.documents.recording`), in bounded memory. Each router of the
recording is replayed from its changes, so that the caches are as the router knew them at each
decision. The rungs of a request, in tokens of its prompt:

* prompt: all of them; what no earlier prompt had there is new, or equal text behind a change;
* reachable: blocks that any earlier request or any engine had before it;
* capacity: those that one shared LRU cache with the blocks of the whole fleet still has. Engines do
  not publish how large their lower tiers are: the most that each rank had there counts;
* best: the most that the events show on one worker, on its device and then in lower tiers;
* expected: what the router counted on the chosen worker, lower tiers in full;
* reused: what the engine reported.

The loss of a step is given to causes block by block, by what happened to the blocks: sent, stored,
removed, cleared. Some are known only later (an event that comes late, a gap that shows later), so a
request is judged ``GRACE_S`` seconds after its end. What no record explains stays ``unexplained``.
"""

from dynctl.health.hits.caches import Bounds, SharedCache
from dynctl.health.hits.ladder import Ladder, Window, hits

__all__ = ["Bounds", "Ladder", "SharedCache", "Window", "hits"]
