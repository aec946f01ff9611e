//! Which parts of a conversation's text the assistant says.

use std::ops::Range;

use serde_json::Value;

use super::{ASSISTANT, ChatError, ChatTemplate, Message};

/// Characters that Unicode keeps from being text, of which two mark places.
const MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

impl ChatTemplate {
    /// What is between the template's own tags.
    pub(super) fn tagged(&self, messages: &[Message], text: &str) -> Result<Vec<Range<usize>>, ChatError> {
        let marks = unused_marks(text).ok_or(ChatError::Tags)?;
        let marked = self.render_with(messages, false, Some(marks))?;
        let (mut plain, mut spans, mut open) = (String::new(), vec![], vec![]);
        for c in marked.chars() {
            if c == marks[0] {
                open.push(plain.len());
            } else if c == marks[1] {
                let start = open.pop().ok_or(ChatError::Tags)?;
                // Tags inside of tags say nothing new.
                spans.extend(open.is_empty().then_some(start..plain.len()));
            } else {
                plain.push(c);
            }
        }
        if plain == text && open.is_empty() { Ok(spans) } else { Err(ChatError::Tags) }
    }

    /// What the template adds for each message of the assistant.
    pub(super) fn spans(&self, messages: &[Message], text: &str) -> Result<Vec<Range<usize>>, ChatError> {
        let (mut spans, mut from) = (vec![], 0);
        for (index, _) in messages.iter().enumerate().filter(|(_, message)| message.role == ASSISTANT) {
            let span = self.added(messages, index, text).or_else(|| self.around_content(messages, index, text, from));
            let span = span.filter(|span| from <= span.start && span.start <= span.end);
            let span = span.ok_or(ChatError::NotSeparable { index })?;
            from = span.end;
            spans.push(span);
        }
        Ok(spans)
    }

    /// From the end of the generation prompt to the end of the text so far, if what follows changes neither.
    fn added(&self, messages: &[Message], index: usize, text: &str) -> Option<Range<usize>> {
        let prompt = self.render_with(&messages[..index], true, None).ok()?;
        let so_far = self.render_with(&messages[..=index], false, None).ok()?;
        (so_far.starts_with(&prompt) && text.starts_with(&so_far)).then_some(prompt.len()..so_far.len())
    }

    /// Looks for the message's content, then for the generation prompt before it and what ends the turn after it.
    fn around_content(&self, messages: &[Message], index: usize, text: &str, from: usize) -> Option<Range<usize>> {
        let marks = unused_marks(text)?;
        let mut messages = messages.to_vec();
        mark(messages[index].rest.get_mut("content")?, marks)?;
        let [whole, so_far] = [&messages[..], &messages[..=index]].map(|messages| {
            let text = self.render_with(messages, false, None).ok()?;
            Content::find(&text, marks)
        });
        let (whole, so_far) = (whole?, so_far?);
        let ending = &so_far.text[so_far.end..];
        if whole.text != text || !text[whole.end..].starts_with(ending) {
            return None;
        }
        let before = self.render_with(&messages[..index], false, None).ok();
        let prompt = self.render_with(&messages[..index], true, None).ok();
        let start = match before.zip(prompt) {
            Some((before, prompt)) => {
                // Of the generation prompt only that which the template writes before this message too: some begin the reasoning.
                let prompt = prompt.strip_prefix(&before)?;
                let turn = so_far.text[..so_far.start.unwrap_or(so_far.end)].strip_prefix(&before)?;
                let header = common_prefix(prompt, turn);
                let limit = whole.start.unwrap_or(whole.end);
                match header {
                    "" => limit,
                    header => from + text.get(from..limit)?.rfind(header)? + header.len(),
                }
            }
            // No message comes before this one.
            None => whole.start?,
        };
        Some(start..whole.end + ending.len())
    }
}

/// A text and where in it a message's content is.
struct Content {
    text: String,
    /// None if the template drops the content's beginning.
    start: Option<usize>,
    end: usize,
}

impl Content {
    /// None if the template writes the content not once.
    fn find(marked: &str, [start, end]: [char; 2]) -> Option<Self> {
        let mut ends = marked.match_indices(end);
        let (Some((end_at, _)), None) = (ends.next(), ends.next()) else { return None };
        let mut starts = marked.match_indices(start);
        let start_at = match (starts.next(), starts.next()) {
            (None, _) => None,
            (Some((at, _)), None) if at < end_at => Some(at),
            _ => return None,
        };
        let text = marked.replace([start, end], "");
        Some(Self { text, start: start_at, end: end_at - start_at.map_or(0, |_| start.len_utf8()) })
    }
}

/// Puts marks around text, inside of the white space that templates strip. None if there is no text.
fn mark(content: &mut Value, [start, end]: [char; 2]) -> Option<()> {
    match content {
        Value::String(text) => {
            let core = text.trim();
            let (before, after) = text.split_once(core).filter(|_| !core.is_empty())?;
            *text = format!("{before}{start}{core}{end}{after}");
            Some(())
        }
        Value::Array(parts) => {
            let mut texts = parts.iter_mut().filter_map(|part| part.get_mut("text"));
            let (first, last) = (texts.next()?, texts.next_back());
            match last {
                None => mark(first, [start, end]),
                Some(last) => {
                    let (first_text, last_text) = (first.as_str()?, last.as_str()?);
                    (*first, *last) = (format!("{start}{first_text}").into(), format!("{last_text}{end}").into());
                    Some(())
                }
            }
        }
        _ => None,
    }
}

/// Two characters that the text does not have.
fn unused_marks(text: &str) -> Option<[char; 2]> {
    let mut unused = MARKS.filter(|mark| !text.contains(*mark));
    Some([unused.next()?, unused.next()?])
}

fn common_prefix<'a>(a: &'a str, b: &str) -> &'a str {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
    &a[..same.map(|(c, _)| c.len_utf8()).sum()]
}
