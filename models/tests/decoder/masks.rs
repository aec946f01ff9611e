//! Loss masks and attention masks: a packed batch equals its separate documents.

use burn::backend::Flex;
use models::Decoder;
use trainer::LanguageModel;
use trainer::batches::{AttnMaskType, Batch};
use trainer::data::Sequence;

use crate::common::{model, tiny, values};

fn document(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (seed * 31 + i * i * 7 + i) % 250).collect()
}

fn loss(model: &Decoder<Flex>, batch: &Batch) -> f32 {
    values(model.batch_loss(batch.tensors::<Flex>(&Default::default())))[0]
}

/// Packs documents into a row of `len + 1` tokens.
fn packed(documents: &[Vec<u32>], len: usize) -> Sequence {
    let mut tokens = vec![];
    let mut document_starts = vec![];
    for document in documents {
        document_starts.push(tokens.len());
        tokens.extend(document);
    }
    let num_tokens = tokens.len();
    tokens.resize(len + 1, 0);
    let mask: Vec<_> = (0..len).map(|target| target + 1 < num_tokens).collect();
    let loss_mask = mask.contains(&false).then_some(mask);
    Sequence { tokens, loss_mask, document_starts, num_tokens }
}

#[test]
fn documents_of_a_packed_batch_do_not_see_each_other() {
    let model = model::<Flex>(tiny(), 3);
    let documents = [document(1, 7), document(2, 11), document(3, 5), document(4, 20)];
    let (mut sum, mut targets) = (0.0, 0);
    for document in &documents {
        let row = packed(std::slice::from_ref(document), document.len() - 1);
        let batch = Batch::new(vec![row], AttnMaskType::Causal);
        sum += loss(&model, &batch) * batch.num_targets() as f32;
        targets += batch.num_targets();
    }
    let expected = sum / targets as f32;

    let rows = vec![packed(&documents[..3], 24), packed(&documents[3..], 24)];
    let batch = Batch::new(rows.clone(), AttnMaskType::BlockCausal);
    assert_eq!((batch.num_targets(), batch.num_tokens()), (targets, 43));
    let block = loss(&model, &batch);
    assert!((block - expected).abs() < 1e-6 * expected, "{block} {expected}");

    // With the causal mask, documents see earlier ones, and first tokens are targets.
    let batch = Batch::new(rows, AttnMaskType::Causal);
    assert_eq!(batch.num_targets(), targets + 2);
    assert!((loss(&model, &batch) - expected).abs() > 1e-3 * expected);
}

#[test]
fn only_targets_that_count_do() {
    let model = model::<Flex>(tiny(), 3);
    let (tokens, len) = (document(5, 17), 16);
    let whole = Sequence { tokens: tokens.clone(), loss_mask: None, document_starts: vec![0], num_tokens: 17 };
    let masked = |counts: &dyn Fn(usize) -> bool| {
        let loss_mask = Some((0..len).map(counts).collect());
        Batch::new(vec![Sequence { loss_mask, ..whole.clone() }], AttnMaskType::Causal)
    };
    let all = loss(&model, &Batch::new(vec![whole.clone()], AttnMaskType::Causal));
    assert!((loss(&model, &masked(&|_| true)) - all).abs() < 1e-6 * all);
    // The mean of two parts, weighted by size, equals the mean of all.
    let (some, others) = (masked(&|i| i % 4 == 1), masked(&|i| i % 4 != 1));
    let mean = (loss(&model, &some) * 4.0 + loss(&model, &others) * 12.0) / 16.0;
    assert!((mean - all).abs() < 1e-6 * all, "{mean} {all}");
    assert_eq!((some.num_targets(), others.num_targets()), (4, 12));
    assert_eq!(loss(&model, &masked(&|_| false)), 0.0);
}
