"""Training an image classifier, from photographs to a network that classifies: the application.

``recipes.training.train`` is the loop of ``mpgluon finetune`` and of ``scripts/train_caltech.py``.
Scripts, lessons and experiments of a checkout import the modules of their own folder.
"""

from mpgluon_tools.extras import extra

with extra("recipes"):
    import PIL
    import pooch
    import tqdm

del PIL, pooch, tqdm
