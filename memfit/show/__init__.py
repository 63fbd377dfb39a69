"""Output for people: predictions, plans, runs and traces go in; terminal tables, HTML reports and files come out.

Nothing here decides or measures; every figure comes from what it is given.
"""
