"""Prediction of an answer's length from its prompt: numpy alone, when it learns and when it is asked.

`facts` and `log` say what is known of a request; `features` turns that into numbers, `network` into scores
of length bins; `train` fits it; `distribution` reads lengths from the scores; `model` is what is asked,
`files` keeps it, `calibration` follows what answers really become. `evaluate` holds it against S3's fixed
buckets (decision 0022).
"""
