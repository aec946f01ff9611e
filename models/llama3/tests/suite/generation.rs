//! Generation: greedy against the full forward pass, seeds, temperature, refusals.

use burn::backend::Flex;
use llama3::Error;
use train::CausalLmExt;
use train::Sampling;
use train::config::ConfigError;

use crate::common::{ids, model, tiny, values};

#[test]
fn greedy_is_the_argmax_of_the_full_forward_pass() {
    let model = model::<Flex>(tiny(), 1);
    let prompt = [5, 17, 200];
    let generated = model.generate(&prompt, 12, 288, &[], Sampling::Greedy).unwrap();
    let mut sequence: Vec<i32> = prompt.iter().map(|&token| token as i32).collect();
    for token in generated {
        let len = sequence.len();
        let logits = values(model.forward(ids(&sequence, [1, len])));
        let last = &logits[(len - 1) * 288..];
        let best = (0..288).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
        assert_eq!(token as usize, best);
        sequence.push(best as i32);
    }
}

#[test]
fn seeds_repeat_and_a_low_temperature_is_greedy() {
    let model = model::<Flex>(tiny(), 2);
    let draw =
        |temperature, seed| model.generate(&[1, 2], 30, 288, &[], Sampling::Temperature { temperature, seed }).unwrap();
    assert_eq!(draw(1.0, 3), draw(1.0, 3));
    assert_ne!(draw(1.0, 3), draw(1.0, 4));
    assert_eq!(draw(1e-9, 3), model.generate(&[1, 2], 30, 288, &[], Sampling::Greedy).unwrap());
}

#[test]
fn only_the_choices_are_chosen() {
    let model = model::<Flex>(tiny(), 3);
    let sampling = Sampling::Temperature { temperature: 100.0, seed: 0 };
    let tokens = model.generate(&[287], 60, 4, &[], sampling).unwrap();
    assert!(tokens.iter().all(|&token| token < 4));
    assert!((0..4).all(|token| tokens.contains(&token)), "nearly uniform: {tokens:?}");
}

#[test]
fn a_stop_token_ends_it() {
    let model = model::<Flex>(tiny(), 3);
    let generate = |stop: &[u32]| model.generate(&[1, 2], 30, 288, stop, Sampling::Greedy).unwrap();
    let all = generate(&[]);
    // Not the first one, and one that has not come before.
    let at = (1..30).find(|&i| !all[..i].contains(&all[i])).expect("more than one token");
    assert_eq!(generate(&[287, all[at]]), all[..at]);
}

#[test]
fn impossible_requests_are_refused() {
    let model = model::<Flex>(tiny(), 4);
    let generate = |prompt: &[u32], choices| model.generate(prompt, 1, choices, &[], Sampling::Greedy);
    assert!(matches!(generate(&[], 288), Err(Error::Config(ConfigError::Value { key: "prompt", .. }))));
    assert!(matches!(generate(&[1], 0), Err(Error::Config(ConfigError::Value { key: "num_choices", .. }))));
    assert!(matches!(generate(&[288], 288), Err(Error::Vocabulary { vocab_size: 288, needed: 289 })));
    assert!(matches!(generate(&[1], 289), Err(Error::Vocabulary { vocab_size: 288, needed: 289 })));
}
