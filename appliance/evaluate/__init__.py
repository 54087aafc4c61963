"""How well a stored model predicts a text, alone and against the model it was made from."""
