//! [`Sampler`]: next token of one text.
//!
//! ```text
//! l[t] ← l[t] / penalty if positive, l[t] · penalty if not        tokens t of the text
//! l ← l / temperature,   p = softmax(l)
//! top-k: l[t] ≥ the k-th largest;   top-p: Σ of the likelier ones < top_p;   min-p: p[t] ≥ min_p · max p
//! ```

use std::collections::BTreeSet;

use super::{Filters, GenerateOptions, Sampling};
use crate::rng::Rng;

/// Chooses the tokens of one text.
pub(super) struct Sampler {
    sampling: Sampling,
    filters: Filters,
    rng: Rng,
    /// Tokens of the text, collected only for the repetition penalty.
    seen: BTreeSet<u32>,
}

impl Sampler {
    /// Sampler of a text that begins with `prompt`.
    pub(super) fn new(prompt: &[u32], options: &GenerateOptions) -> Self {
        let &GenerateOptions { sampling, filters, .. } = options;
        let rng = match sampling {
            Sampling::Greedy => Rng::new(0),
            Sampling::Temperature { seed, .. } => Rng::named(seed, "generate"),
        };
        let mut sampler = Self { sampling, filters, rng, seen: BTreeSet::new() };
        prompt.iter().for_each(|token| sampler.see(*token));
        sampler
    }

    /// Chooses the next token; `None` if a logit is NaN or the largest is not finite.
    pub(super) fn choose(&mut self, logits: &[f32]) -> Option<u32> {
        if logits.iter().any(|logit| logit.is_nan()) {
            return None;
        }
        let mut logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
        let penalty = self.filters.repetition_penalty;
        for token in &self.seen {
            // Tokens of a prompt may be outside of the choices.
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
        }
        let best = argmax(&logits);
        if !logits[best].is_finite() {
            return None;
        }
        let token = match self.sampling {
            Sampling::Greedy => best,
            Sampling::Temperature { temperature, .. } => {
                let largest = logits[best];
                let weights = logits.iter().map(|logit| ((logit - largest) / temperature).exp()).collect();
                let weights = self.filters.apply(weights);
                draw(&weights, best, &mut self.rng)
            }
        };
        self.see(token as u32);
        Some(token as u32)
    }

    fn see(&mut self, token: u32) {
        if self.filters.repetition_penalty != 1.0 {
            self.seen.insert(token);
        }
    }
}

impl Filters {
    /// Sets the weights of excluded tokens to 0. The largest weight is 1.
    fn apply(&self, mut weights: Vec<f64>) -> Vec<f64> {
        let Self { top_k, top_p, min_p, .. } = *self;
        if top_k.is_none() && top_p == 1.0 {
            weights.iter_mut().filter(|weight| **weight < min_p).for_each(|weight| *weight = 0.0);
            return weights;
        }
        let mut order: Vec<usize> = (0..weights.len()).collect();
        order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]));
        let mut kept = order.len();
        if let Some(top_k) = top_k.filter(|top_k| top_k.get() < kept) {
            let last = weights[order[top_k.get() - 1]];
            kept = order.partition_point(|token| weights[*token] >= last);
        }
        let total: f64 = order[..kept].iter().map(|token| weights[*token]).sum();
        let mut before = 0.0;
        let in_nucleus = order[..kept].iter().take_while(|token| {
            let is_in = before < top_p * total;
            before += weights[**token];
            is_in
        });
        kept = in_nucleus.count().max(1);
        kept = order[..kept].partition_point(|token| weights[*token] >= min_p);
        order[kept..].iter().for_each(|token| weights[*token] = 0.0);
        weights
    }
}

/// Index of the largest value; the first if several are equal.
fn argmax(logits: &[f64]) -> usize {
    (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

fn draw(weights: &[f64], best: usize, rng: &mut Rng) -> usize {
    let mut left = rng.uniform() * weights.iter().sum::<f64>();
    for (token, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return token;
        }
    }
    // Only after rounding errors in the sum.
    best
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;

    fn sampler(prompt: &[u32], sampling: Sampling, filters: Filters) -> Sampler {
        Sampler::new(prompt, &GenerateOptions { sampling, filters, ..GenerateOptions::new(1, 1) })
    }

    #[test]
    fn the_first_of_equal_logits_is_taken() {
        let greedy = |logits: &[f32]| sampler(&[], Sampling::Greedy, Filters::default()).choose(logits);
        assert_eq!(greedy(&[1.0, 3.0, -2.0, 3.0]), Some(1));
        assert_eq!(greedy(&[f32::NEG_INFINITY; 3]), None);
        assert_eq!(greedy(&[1.0, f32::NAN]), None);
        assert_eq!(greedy(&[1.0, f32::INFINITY]), None);
        assert_eq!(greedy(&[f32::NEG_INFINITY, -1e30]), Some(1));
    }

    /// Tokens drawn in many trials with probabilities .4, .3, .2, .06, .04.
    fn drawn(filters: Filters) -> Vec<u32> {
        let logits = [0.06_f32, 0.4, 0.3, 0.04, 0.2].map(f32::ln);
        let mut sampler = sampler(&[], Sampling::Temperature { temperature: 1.0, seed: 1 }, filters);
        let mut drawn: Vec<u32> = (0..2000).map(|_| sampler.choose(&logits).unwrap()).collect();
        drawn.sort_unstable();
        drawn.dedup();
        drawn
    }

    #[test]
    fn filters_leave_what_hugging_faces_leave() {
        let all = Filters::default();
        assert_eq!(drawn(all), [0, 1, 2, 3, 4]);
        assert_eq!(drawn(Filters { top_k: NonZero::new(3), ..all }), [1, 2, 4]);
        assert_eq!(drawn(Filters { top_k: NonZero::new(50), ..all }), [0, 1, 2, 3, 4]);
        assert_eq!(drawn(Filters { top_p: 0.5, ..all }), [1, 2]);
        assert_eq!(drawn(Filters { top_p: 0.01, ..all }), [1]);
        assert_eq!(drawn(Filters { min_p: 0.4, ..all }), [1, 2, 4]);
        // The nucleus refers to the tokens left by top-k: .4 of .7 is less than .6.
        assert_eq!(drawn(Filters { top_k: NonZero::new(2), top_p: 0.6, ..all }), [1, 2]);
        assert_eq!(drawn(Filters { top_k: NonZero::new(2), top_p: 0.5, ..all }), [1]);
        assert_eq!(drawn(Filters { top_p: 0.85, min_p: 0.6, ..all }), [1, 2]);
    }

    #[test]
    fn tokens_as_likely_as_the_last_of_top_k_stay() {
        let filters = Filters { top_k: NonZero::new(2), ..Filters::default() };
        assert_eq!(filters.apply(vec![0.5, 1.0, 0.5, 0.25]), [0.5, 1.0, 0.5, 0.0]);
    }

    #[test]
    fn what_the_text_has_counts_against_a_token() {
        let filters = Filters { repetition_penalty: 2.0, ..Filters::default() };
        let mut sampler = sampler(&[2, 9], Sampling::Greedy, filters);
        // The prompt has token 2, so its 5 becomes 2.5. Then 1 is halved, and both are below it.
        let logits = [1.4, 3.0, 5.0, -1.0];
        assert_eq!([(); 3].map(|()| sampler.choose(&logits)), [Some(1), Some(2), Some(2)]);
        let negative = [-1.5, -1.0, -9.0, -3.0];
        assert_eq!(sampler.choose(&negative), Some(0), "-1 counts as -2");
    }
}
