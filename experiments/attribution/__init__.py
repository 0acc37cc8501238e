"""Attribution against peers: how well scores foretell the loss after retraining."""
