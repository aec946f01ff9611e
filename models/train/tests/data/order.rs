//! An epoch has every sequence once, in an order that depends only on seed and epoch.

use train::rng::Rng;
use train::{Dataset, Sequence};

use crate::{Files, noise, take, wrapped};

fn dataset() -> (Files, Dataset) {
    let files = Files::new([("a", noise(&mut Rng::new(3), 999))]);
    let dataset = files.all();
    (files, dataset)
}

fn epochs(dataset: &Dataset, seed: u64) -> Vec<Vec<Sequence>> {
    let mut sequences = dataset.train(wrapped(9), seed).unwrap();
    (0..3).map(|_| take(&mut sequences, 111)).collect()
}

fn sorted(mut epoch: Vec<Sequence>) -> Vec<Sequence> {
    epoch.sort_by(|a, b| a.tokens.cmp(&b.tokens));
    epoch
}

#[test]
fn every_epoch_has_everything_once() {
    let (_files, dataset) = dataset();
    let epochs = epochs(&dataset, 1);
    let all = sorted(epochs[0].clone());
    assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
    for epoch in epochs {
        assert_eq!(sorted(epoch), all);
    }
}

#[test]
fn the_order_is_that_of_seed_and_epoch() {
    let (_files, dataset) = dataset();
    let (first, second) = (epochs(&dataset, 1), epochs(&dataset, 2));
    assert_eq!(first, epochs(&dataset, 1));
    let all = [&first[0], &first[1], &first[2], &second[0], &second[1], &second[2]];
    for (i, epoch) in all.iter().enumerate() {
        assert!(all[..i].iter().all(|other| other != epoch));
    }
    // Other data of the same size has the same order.
    let other = Files::new([("b", noise(&mut Rng::new(4), 999))]);
    let places = |dataset: &Dataset, seed| {
        let stream = crate::stream(dataset).0;
        let place = |s: &Sequence| stream.windows(10).position(|window| window == s.tokens).unwrap();
        epochs(dataset, seed).concat().iter().map(place).collect::<Vec<_>>()
    };
    assert_eq!(places(&dataset, 7), places(&other.all(), 7));
}
