"""`phasewise chat`: a conversation with a model that stays open."""
