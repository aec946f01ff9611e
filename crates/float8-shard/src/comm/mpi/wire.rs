//! Byte encoding of a collective: equal if and only if two ranks are in the same one.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::comm::collective::{Collective, Operation};

/// Length of the encoding in bytes.
pub(super) const ENCODED: usize = 256;
const HEAD: usize = 8 * 3 + 2;

/// Encodes a collective. A long label is truncated, but its hash covers all of it.
pub(super) fn encode(collective: &Collective) -> [u8; ENCODED] {
    // Its keys are constants, so ranks that run the same program agree.
    let mut hasher = DefaultHasher::new();
    collective.label.hash(&mut hasher);
    let mut out = [0; ENCODED];
    out[..8].copy_from_slice(&collective.number.to_le_bytes());
    out[8..16].copy_from_slice(&collective.bytes.to_le_bytes());
    out[16..24].copy_from_slice(&hasher.finish().to_le_bytes());
    out[24] = collective.operation as u8;
    let label = &collective.label.as_bytes()[..collective.label.floor_char_boundary(ENCODED - HEAD)];
    out[25] = label.len() as u8;
    out[HEAD..][..label.len()].copy_from_slice(label);
    out
}

/// Decodes a collective, with the start of a long label. None for other bytes.
pub(super) fn decode(bytes: &[u8]) -> Option<Collective> {
    let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let operation = Operation::ALL.into_iter().find(|operation| Some(&(*operation as u8)) == bytes.get(24))?;
    let label = bytes.get(HEAD..HEAD + usize::from(*bytes.get(25)?))?;
    let label = String::from_utf8_lossy(label).into_owned();
    Some(Collective { number: word(0)?, operation, label, bytes: word(8)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(number: u64, operation: Operation, label: &str, bytes: u64) -> Collective {
        Collective { number, operation, label: label.into(), bytes }
    }

    #[test]
    fn a_collective_survives_the_wire() {
        for operation in Operation::ALL {
            let collective = of(u64::MAX, operation, "layers.3.wq", 1 << 40);
            assert_eq!(decode(&encode(&collective)), Some(collective));
        }
        assert_eq!(decode(&[255; ENCODED]), None);
        assert_eq!(decode(&[0; 20]), None);
    }

    #[test]
    fn each_part_makes_a_difference() {
        let first = encode(&of(1, Operation::AllGather, "wq", 8));
        let others = [
            of(2, Operation::AllGather, "wq", 8),
            of(1, Operation::AllToAll, "wq", 8),
            of(1, Operation::AllGather, "wk", 8),
            of(1, Operation::AllGather, "wq", 4),
        ];
        assert!(others.iter().all(|other| encode(other) != first));
    }

    #[test]
    fn long_labels_are_cut_for_print_and_compared_whole() {
        let long = "é".repeat(400);
        let [a, b] = [long.clone() + "a", long + "b"].map(|label| encode(&of(1, Operation::AllToAll, &label, 0)));
        assert_ne!(a, b);
        assert_eq!(decode(&a).unwrap().label, "é".repeat(115));
        assert_eq!(decode(&a), decode(&b));
    }
}
