"""The methods' losses as the papers state them, for autograd in float64; this module shares no code with the package.

Features are (B, d) leaf tensors with valid rows only. Sums over j != i use the whole similarity matrix and a mask.
"""

import torch
from torch import Tensor


def logits(image: Tensor, text: Tensor, tau: Tensor, hinge: float | None = None) -> tuple[Tensor, Tensor]:
    """Return the (B, B) exponents for image anchors (rows) against texts and for text anchors (rows) against images.

    tau is 0-dim, or has shape (2, B), with one value for each anchor in each direction.
    """
    s = image @ text.T
    positive = (image * text).sum(1, keepdim=True)
    x1 = s - positive
    x2 = s.T - positive
    if hinge is not None:
        x1 = (x1 + hinge).clamp(min=0) ** 2
        x2 = (x2 + hinge).clamp(min=0) ** 2
    taus = tau.expand(2, len(image)).unsqueeze(2)
    return x1 / taus[0], x2 / taus[1]


def log_mean_exp(exponents: Tensor) -> Tensor:
    """Return log g_i, of shape (B,), where g_i is the mean of exp(exponents) over j != i."""
    size = exponents.shape[0]
    diagonal = torch.eye(size, dtype=torch.bool)
    return exponents.masked_fill(diagonal, -torch.inf).logsumexp(1) - torch.log(torch.tensor(size - 1.0).to(exponents))


def mean_exponentials(image: Tensor, text: Tensor, tau: Tensor) -> Tensor:
    """Return g, of shape (2, B), without a hinge; tau is as in `logits`."""
    return torch.stack([log_mean_exp(x).exp() for x in logits(image, text, tau)])


def openclip(image: Tensor, text: Tensor, tau: Tensor) -> Tensor:
    """Return the mean of the two cross-entropies of the scaled similarity matrix, as in OpenCLIP."""
    scores = image @ text.T / tau
    labels = torch.arange(len(scores))
    of_images = torch.nn.functional.cross_entropy(scores, labels)
    of_texts = torch.nn.functional.cross_entropy(scores.T, labels)
    return (of_images + of_texts) / 2


def siglip(image: Tensor, text: Tensor, tau: Tensor, bias: Tensor) -> Tensor:
    """Return minus the log-likelihood of which pairs match, summed over pairs and divided by B (SigLIP eq. 1)."""
    sign = 2 * torch.eye(len(image)).to(image) - 1
    return -torch.nn.functional.logsigmoid(sign * (image @ text.T / tau + bias)).sum() / len(image)


def global_contrastive(image: Tensor, text: Tensor, tau: Tensor, u: Tensor, eps: float) -> Tensor:
    """Return FastCLIP eq. 7, tau/B sum_i [g1_i/(eps + u1_i) + g2_i/(eps + u2_i)]; u and the first tau are fixed."""
    return tau.detach() * (mean_exponentials(image, text, tau) / (eps + u)).mean(1).sum()


def fastclip_v0_released_code(image: Tensor, text: Tensor, tau: Tensor, u: Tensor, eps: float) -> Tensor:
    """Return a loss whose gradients are those of FastCLIP's code for v0: 1/2 (mean of anchors + mean of negatives).

    Both halves are the mean of g1/(eps + u1) + g2/(eps + u2). In the first, the code propagates gradients to the
    anchors and their partners, as in a rank's rows against the gathered, constant features of all ranks. In the second,
    it propagates gradients to the negatives, as in constant anchors of all ranks against a rank's rows. Both halves
    depend on tau.
    """
    size = len(image)
    diagonal = torch.eye(size, dtype=torch.bool)

    def mean_of_ratios(anchors: tuple[Tensor, Tensor], negatives: tuple[Tensor, Tensor], positive: Tensor) -> Tensor:
        total = torch.zeros_like(tau)
        for direction in (0, 1):
            exponents = (anchors[direction] @ negatives[1 - direction].T - positive.unsqueeze(1)) / tau
            g = exponents.exp().masked_fill(diagonal, 0.0).sum(1) / (size - 1)
            total = total + (g / (eps + u[direction])).mean()
        return total

    features = (image, text)
    constants = (image.detach(), text.detach())
    positive = (image * text).sum(1)
    of_anchors = mean_of_ratios(features, constants, positive)
    of_negatives = mean_of_ratios(constants, features, positive.detach())
    return (of_anchors + of_negatives) / 2


def robust_tau_gradient(image: Tensor, text: Tensor, tau: Tensor, u: Tensor, eps: float, rho: float) -> Tensor:
    """Return tau's gradient, FastCLIP eq. 10: mean of log(eps + u1) + log(eps + u2), + 2 rho + tau x the data term."""
    leaf = tau.detach().clone().requires_grad_()
    g = mean_exponentials(image, text, leaf)
    (grad_tau,) = torch.autograd.grad((g / (eps + u)).mean(1).sum(), leaf)
    return torch.log(eps + u).mean(1).sum() + 2 * rho + tau.detach() * grad_tau


def alphas(image: Tensor, text: Tensor, tau: Tensor, w1: Tensor, w2: Tensor, eps: float) -> Tensor:
    """Return alpha, of shape (2, B), from NeuCLIP eq. 10; each row of w1 and of w2 is a prototype."""
    positive = (image * text).sum(1, keepdim=True)
    predictions = []
    for anchors, prototypes in ((image, w1), (text, w2)):
        cosine = anchors @ (prototypes / prototypes.norm(dim=1, keepdim=True)).T
        predictions.append(torch.log(eps + torch.exp((cosine - positive) / tau).mean(1)))
    return torch.stack(predictions)


def neuclip(
    image: Tensor,
    text: Tensor,
    tau: Tensor,
    w1: Tensor,
    w2: Tensor,
    eps: float,
    rho: float,
    reading: str = "full",
) -> Tensor:
    """Return NeuCLIP eq. 12; `reading` (see `conjugate`) selects the part of alpha that is constant in the gradient."""
    return 2 * rho * tau + tau * conjugate(image, text, tau, alphas(image, text, tau, w1, w2, eps), eps, reading)


def pooled_neuclip(
    image: Tensor, text: Tensor, tau: Tensor, w1: Tensor, w2: Tensor, eps: float, rho: float, kappa: float
) -> Tensor:
    """Return the loss of `npn.kappa`; within ghat, the prototypes, the partner and the anchors' mean are constant."""
    g = mean_exponentials(image, text, tau)
    pooled = []
    for number, (anchors, partners, prototypes) in enumerate(((image, text, w1), (text, image, w2))):
        relative = relative_to_mean(anchors)
        positive = (relative * partners.detach()).sum(1, keepdim=True)
        cosine = relative @ (prototypes / prototypes.norm(dim=1, keepdim=True)).T
        predicted = torch.exp((cosine - positive) / tau).mean(1)
        pooled.append(torch.log(eps + (g[number] + kappa * predicted) / (1 + kappa)))
    return tau * torch.stack(pooled).mean(1).sum() + 2 * rho * tau


def conjugate(image: Tensor, text: Tensor, tau: Tensor, alpha: Tensor, eps: float, reading: str) -> Tensor:
    """Return 1/B sum_i [exp(-alpha_i)(eps + g_i) + alpha_i - 1], summed over both directions.

    With `stop`, alpha (2, B) is constant; with `positive`, alpha_i + s_ii/tau is constant; with `full`, neither is.
    """
    g = mean_exponentials(image, text, tau)
    positive = (image * text).sum(1) / tau
    if reading == "stop":
        alpha = alpha.detach()
    elif reading == "positive":
        alpha = (alpha + positive).detach() - positive
    return ((-alpha).exp() * (eps + g) + alpha - 1).mean(1).sum()


def amorlip(image: Tensor, text: Tensor, tau: Tensor, log_lambda: Tensor, c: float, rho: float) -> Tensor:
    """Return AmorLIP's stage II loss: tau_const [-2/tau mean s_ii + mean C1/lambda1 + mean C2/lambda2] + rho tau.

    C_i = 1/(B-1) [sum_{j != i} exp(s_ij/tau) + c exp(s_ii/tau)]; lambda (2, B) and tau_const are constant.
    """
    size = len(image)
    scores = image @ text.T / tau
    weight = (1 + (c - 1) * torch.eye(size).to(image)) / (size - 1)
    image_ratio = (weight * scores.exp()).sum(1) / log_lambda[0].exp()
    text_ratio = (weight * scores.T.exp()).sum(1) / log_lambda[1].exp()
    return tau.detach() * (-2 * scores.diagonal().mean() + image_ratio.mean() + text_ratio.mean()) + rho * tau


def relative_to_mean(rows: Tensor) -> Tensor:
    """Return the rows, with a gradient only for their differences from their mean."""
    mean = rows.mean(0)
    return rows - mean + mean.detach()


def pooled_normalizers(
    image: Tensor, text: Tensor, tau: Tensor, queues: tuple[Tensor, Tensor], others: Tensor, kappa: float
) -> Tensor:
    """Return (g + kappa ghat)/(1 + kappa), of shape (2, B), for a queue of texts and a queue of images.

    `others` (B, m) marks the entries whose sample differs from the anchor's; if an anchor has none, its result is g.
    The queues are constant, and so are the anchor's partner and the anchors' mean within ghat.
    """
    count = others.sum(1)
    pooled = []
    directions = zip(logits(image, text, tau), (image, text), (text, image), queues, strict=True)
    for exponent, anchors, partners, queue in directions:
        batch = log_mean_exp(exponent).exp()
        relative = relative_to_mean(anchors)
        positive = (relative * partners.detach()).sum(1, keepdim=True)
        terms = torch.exp((relative @ queue.T - positive) / tau) * others
        queued = terms.sum(1) / count.clamp(min=1)
        pooled.append(torch.where(count > 0, (batch + kappa * queued) / (1 + kappa), batch))
    return torch.stack(pooled)
