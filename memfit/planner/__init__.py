"""The planner: a job, a device and a request go in; a prediction, a plan with its reasons, or what is lacking come out.

``predict`` gives the Footprint of one setting, ``search.search.find_plan`` the fastest plan that fits.
"""
