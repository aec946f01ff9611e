//! Panel of FP8 health: one cell per layer and sample.

use std::collections::BTreeMap;

use train::metrics::{HealthRecord, Record};

use crate::support::{Fixture, Svg, db, health, steps};

#[test]
fn a_record_without_an_operand_is_no_layer() {
    let fixture = Fixture::new();
    let mut records = steps([2.0, 1.0]);
    let none = BTreeMap::from([("layer".to_owned(), BTreeMap::new())]);
    records.push(Record { step: 2, health: none, ..Default::default() });
    assert!(!fixture.plot(&[fixture.run("run", &records)]).has("FP8 health"));
}

#[test]
fn health_is_a_cell_for_each_layer_and_sample() {
    let fixture = Fixture::new();
    let flushed = HealthRecord { flushed: 0.5, ..db(30.0) };
    let non_finite = HealthRecord { non_finite: 1, ..db(30.0) };
    let zero = HealthRecord::default();
    let records = [
        health(10, &[("layers.2.wq", db(10.0)), ("layers.10.wq", flushed), ("norm", zero)]),
        health(2000, &[("layers.2.wq", db(40.0)), ("layers.10.wq", non_finite)]),
    ];
    let svg = fixture.plot(&[fixture.run("run", &records)]);
    let texts = svg.texts();
    let position = |text: &str| texts.iter().position(|other| *other == text).unwrap_or_else(|| panic!("{text}"));
    assert!(position("layers.2.wq") < position("layers.10.wq") && position("layers.10.wq") < position("norm"));
    assert!(svg.has("FP8 health: run") && svg.has("SQNR (dB)") && svg.has("sampled step"));
    for label in ["10", "2,000", "20", "30", "40", "S", "F", "N"] {
        position(label);
    }
    assert!(!svg.has("Training loss"), "there is none");
    // Both ends of the colour scale: the cells and, nearly, the bar.
    assert_eq!((svg.count("rect", "#440154"), svg.count("rect", "#FEE825") + svg.count("rect", "#FDE725")), (1, 1));
    assert_eq!(svg.count("rect", "#AAAAAA"), 1, "all zero");
    // For layers.10.wq, under F and under N.
    assert_eq!(svg.count("rect", "#222222"), 2);
}

#[test]
fn many_layers_are_labelled_now_and_then() {
    let fixture = Fixture::new();
    let names: Vec<_> = (0..1200).map(|i| format!("layers.{i}")).collect();
    let layers = |n: usize| names[..n].iter().map(|name| (name.as_str(), db(30.0))).collect::<Vec<_>>();
    for (n, samples) in [(300, 12), (1200, 40)] {
        let layers = layers(n);
        let records: Vec<_> = (1..=samples).map(|step| health(step, &layers)).collect();
        let svg = fixture.plot(&[fixture.run(&format!("{n}"), &records)]);
        let ys: Vec<i32> = svg
            .0
            .split("<text ")
            .filter(|text| text.contains("layers."))
            .map(|text| Svg::attribute(&format!(" {text}"), "y").parse().unwrap())
            .collect();
        assert!(ys.len() > 10 && ys.windows(2).all(|pair| pair[1] - pair[0] >= 24), "{ys:?}");
        let all = svg.texts().join(" ");
        assert_eq!(all.contains("Each row is the worst of up to 2 layers."), n > 800);
        assert_eq!(all.contains("Each column is the worst of up to 2 samples."), n > 800);
    }
}
