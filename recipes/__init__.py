"""Training an image classifier, from photographs to a network that classifies: the application.

It is not installed with mpgluon: scripts, lessons and experiments import it from this folder.
``recipes.training.train`` is the loop of ``scripts/train_caltech.py``.
"""

from mpgluon_tools.extras import extra

with extra("recipes"):
    import PIL
    import pooch
    import tqdm

del PIL, pooch, tqdm
