"""`phasewise report`: the database's facts of this machine, and the page of them."""
