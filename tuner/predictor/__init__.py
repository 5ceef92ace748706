"""Prediction of an answer's length from its prompt, trained and run with numpy alone.

`log` reads facts of requests; `features` turns them into numbers, `network` into scores of length bins;
`train` fits the network; `distribution` reads lengths from the scores; `model` is the trained predictor,
`files` stores it, `live` follows finished answers. `evaluate` compares it with S3's fixed buckets (decision
0022)."""
