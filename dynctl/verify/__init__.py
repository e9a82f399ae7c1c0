"""`topology verify`: is each worker's topology the same from its node's label to the router?

1. ``verification``: from the options to a report, again and again with --wait. ``gather/`` reads
   facts (``cluster_facts``): every list once, then files and logs of a few pods, then routers.
   A fact that could not be read is ``Unread`` with the reason.
2. ``join``: the facts by graph and worker. Each worker gets a ``chain`` for each domain of its
   ``graph_policy``: node label, pod label, file, card, taint, router. ``claims`` finds the
   registrations of a pod.
3. ``checks/``: one file for each hundred of codes, one function for each code, in ``checks/all``.
   A function gets the joined facts and returns what is wrong. ``needs``: what it requires.
   What it cannot judge goes into a ``wording.CheckTally``: as unread, or explained by an earlier
   code (``root_causes``, ``registration``), so that one fault is reported once.
4. ``chain_rows``: one row for each worker, which shows where its chain breaks.

Only gather/ and verification do input and output.
"""
