//! Finds the parts of a conversation's text that the assistant says.

use std::ops::{Range, RangeInclusive};

use anyhow::{Context, Result};
use serde_json::Value;

use super::{ASSISTANT, ChatTemplate, Message, not_separable};
use crate::Tokenizer;

/// With more turns than this, most are found by the text around the first one. Rendering everything
/// before each turn takes time quadratic in their number.
pub(super) const MANY: usize = 8;
/// Bytes after a turn that must match too.
const NEXT: usize = 8;

impl ChatTemplate {
    /// Ranges between the template's own tags.
    pub(super) fn tagged(&self, messages: &[Message], text: &str) -> Result<Vec<Range<usize>>> {
        let changed = "the chat template changes what its tags {% generation %} mark";
        let marks = unused(text).context(changed)?;
        let marked = self.render_with(messages, false, Some(marks))?;
        let (_, spans) = spans_between(&marked, marks).filter(|(plain, _)| plain == text).context(changed)?;
        Ok(spans)
    }
}

/// Conversation with its text, and the inputs to render others.
pub(super) struct Rendered<'a> {
    pub(super) template: &'a ChatTemplate,
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) messages: &'a [Message],
    pub(super) text: &'a str,
    /// Ranges of the special tokens in the text.
    pub(super) specials: &'a [Range<usize>],
}

impl Rendered<'_> {
    /// Ranges that the template adds for messages of the assistant. More than `many` turns are found
    /// by the text around the first one.
    pub(super) fn turns(&self, many: usize) -> Result<Vec<Range<usize>>> {
        let Self { messages, text, specials, .. } = *self;
        let is_assistant = |(index, message): (usize, &Message)| (message.role == ASSISTANT).then_some(index);
        let turns: Vec<usize> = messages.iter().enumerate().filter_map(is_assistant).collect();
        let alike = if turns.len() > many { self.alike(&turns) } else { None };
        let (mut spans, mut from) = (vec![], 0);
        for (number, &index) in turns.iter().enumerate() {
            let span = alike.as_ref().and_then(|alike| alike[number].clone()).or_else(|| self.turn_at(index, from));
            let span = span.filter(|span| from <= span.start && span.start <= span.end);
            let span = span.ok_or_else(|| not_separable(index))?;
            from = span.end;
            // White space after the token that ends a turn belongs to the template.
            let last = specials.iter().rfind(|special| span.start <= special.start && special.end <= span.end);
            let ends_turn =
                |last: &&Range<usize>| text.get(last.end..span.end).is_some_and(|rest| rest.trim().is_empty());
            let end = match last.filter(ends_turn) {
                Some(last) => last.end,
                // The end of the conversation also ends its last turn.
                None if index + 1 == messages.len() => text.len(),
                // In some templates the token of the next role ends the turn, so generation has to
                // produce it.
                None => {
                    let next = specials.iter().find(|special| span.end <= special.start);
                    let ends = next.filter(|next| text[span.end..next.start].trim().is_empty());
                    ends.map_or(span.end, |next| next.end)
                }
            };
            spans.push(span.start..end);
        }
        Ok(spans)
    }

    /// Range that the template adds for one assistant message. The search starts at `from`.
    fn turn_at(&self, index: usize, from: usize) -> Option<Range<usize>> {
        self.added(index).or_else(|| self.around_content(index, from))
    }

    /// Turns whose content has the same surroundings as the first one: the whole generation prompt,
    /// the end of the turn, and the text after it. `None` if the template does not show all
    /// contents, or if some turns fail a check.
    fn alike(&self, turns: &[usize]) -> Option<Vec<Option<Range<usize>>>> {
        let marks = unused(self.text)?;
        let mut messages = self.messages.to_vec();
        let marked: Vec<bool> =
            turns.iter().map(|index| mark_content(&mut messages[*index], marks).is_some()).collect();
        let (plain, found) = spans_between(&self.template.render_with(&messages, false, None).ok()?, marks)?;
        if plain != self.text || found.len() != marked.iter().filter(|marked| **marked).count() {
            return None;
        }
        let mut found = found.into_iter();
        let contents: Vec<_> = marked.iter().map(|marked| if *marked { found.next() } else { None }).collect();

        let (first, content) = (self.turn_at(turns[0], 0)?, contents[0].clone()?);
        let opening = self.opening(&self.messages[..turns[0]]).filter(|opening| !opening.is_empty())?;
        let lead = content.start.checked_sub(first.start)?;
        let before = opening + &self.text[first.start..content.start];
        let after = self.text.get(content.end..first.end)?;
        let next = self.text.ceil_char_boundary((first.end + NEXT).min(self.text.len()));
        let after_and_next = self.text.get(content.end..next)?;
        let alike = |content: &Range<usize>| {
            let is_alike =
                self.text[..content.start].ends_with(&before) && self.text[content.end..].starts_with(after_and_next);
            is_alike.then(|| content.start - lead..content.end + after.len())
        };
        let mut spans: Vec<_> = contents.iter().map(|content| content.as_ref().and_then(alike)).collect();
        // The end of the conversation may end its last turn.
        *spans.last_mut()? = None;
        for number in [1, turns.len() / 2, turns.len() - 2] {
            let from = spans[number - 1].as_ref().map_or(0, |span| span.end);
            if spans[number].is_some() && spans[number] != self.turn_at(turns[number], from) {
                return None;
            }
        }
        Some(spans)
    }

    fn prompt(&self, messages: &[Message]) -> Option<String> {
        self.template.render_with(messages, true, None).ok()
    }

    /// Text to which messages can be added. Some templates end a text without a generation prompt
    /// differently; that ending is removed.
    fn so_far(&self, messages: &[Message]) -> Option<String> {
        let mut text = self.template.render_with(messages, false, None).ok()?;
        if let Some(prompt) = self.prompt(messages).filter(|prompt| !prompt.starts_with(&text)) {
            let same = common_prefix(&text, &prompt).len();
            let (_, ranges) = self.tokenizer.encode_with_ranges(&text).ok()?;
            let split = ranges.iter().find(|range| range.start < same && same < range.end);
            text.truncate(text.floor_char_boundary(split.map_or(same, |token| token.start)));
        }
        Some(text)
    }

    /// Range from the end of the generation prompt to the end of the text so far. `None` if later
    /// messages change either.
    fn added(&self, index: usize) -> Option<Range<usize>> {
        let prompt = self.prompt(&self.messages[..index])?;
        let so_far = self.so_far(&self.messages[..=index])?;
        (so_far.starts_with(&prompt) && self.text.starts_with(&so_far)).then_some(prompt.len()..so_far.len())
    }

    /// Searches for the message's content, the generation prompt before it, and the end of the turn
    /// after it.
    fn around_content(&self, index: usize, from: usize) -> Option<Range<usize>> {
        let (content, end) = self.turn(index)?;
        let limit = content.start.unwrap_or(content.end);
        let opening = self.opening(&self.messages[..index]).or_else(|| self.opening(self.messages))?;
        let previous = index.checked_sub(1).and_then(|previous| self.turn(previous));
        let start = match previous {
            Some((_, previous)) => previous + self.header(&opening, previous, limit, content.start.is_some())?,
            None => match self.text.get(from..limit)?.rfind(&opening) {
                Some(at) if !opening.is_empty() => from + at + opening.len(),
                _ => content.start?,
            },
        };
        Some(start..end)
    }

    /// Bytes of a turn's header in the text from `at`: the part shared with the generation prompt.
    ///
    /// A prompt may open a thought that the text lacks. The header then ends where the content
    /// begins, if that `is_known`, or else after a special token or a line. Content and the mark of
    /// a thought may begin with the same letters.
    fn header(&self, opening: &str, at: usize, limit: usize, is_known: bool) -> Option<usize> {
        let same = common_prefix(opening, self.text.get(at..limit)?);
        let mut specials = self.specials.iter().filter(|special| at <= special.start && special.end <= at + same.len());
        let special = specials.next_back().map(|special| special.end - at);
        Some(match same.len() == opening.len() || is_known && at + same.len() == limit {
            true => same.len(),
            false => special.max(same.rfind('\n').map(|end| end + 1)).unwrap_or(same.len()),
        })
    }

    /// Text that a generation prompt adds to the text so far.
    fn opening(&self, messages: &[Message]) -> Option<String> {
        let (prompt, so_far) = (self.prompt(messages)?, self.so_far(messages)?);
        Some(prompt.strip_prefix(&so_far)?.to_string())
    }

    /// Position of a message's content in the text, and the end of its turn.
    fn turn(&self, index: usize) -> Option<(Marked, usize)> {
        // Some templates drop the content of a message with calls, and others drop the calls.
        let (whole, so_far) = self.marked(index, mark_content).or_else(|| self.marked(index, mark_call))?;
        let ending = &so_far.text[so_far.end..];
        let end = self.text[whole.end..].starts_with(ending).then_some(whole.end + ending.len())?;
        Some((whole, end))
    }

    /// Whole text and text so far, with marks in a message.
    fn marked(&self, index: usize, mark: fn(&mut Message, Marks) -> Option<()>) -> Option<(Marked, Marked)> {
        let marks = unused(self.text)?;
        let mut messages = self.messages.to_vec();
        mark(&mut messages[index], marks)?;
        let whole = Marked::read(&self.template.render_with(&messages, false, None).ok()?, marks)?;
        let so_far = Marked::read(&self.so_far(&messages[..=index])?, marks)?;
        (whole.text == self.text).then_some((whole, so_far))
    }
}

/// Puts marks around the text of the content. `None` if it has no text.
fn mark_content(message: &mut Message, marks: Marks) -> Option<()> {
    match message.rest.get_mut("content")? {
        Value::String(text) => *text = around(text, marks),
        Value::Array(parts) => {
            let mut texts = parts.iter_mut().filter_map(|part| part.get_mut("text")).filter(|text| text.is_string());
            let (first, last) = (texts.next()?, texts.next_back());
            let text = first.as_str()?;
            match last {
                None => *first = around(text, marks).into(),
                Some(last) => {
                    *first = format!("{}{text}", marks[0]).into();
                    *last = format!("{}{}", last.as_str()?, marks[1]).into();
                }
            }
        }
        _ => return None,
    }
    Some(())
}

/// Puts the end mark after the name of the last function called.
fn mark_call(message: &mut Message, [_, end]: Marks) -> Option<()> {
    let call = message.rest.get_mut("tool_calls")?.as_array_mut()?.last_mut()?;
    let call = if call.get("function").is_some() { call.get_mut("function")? } else { call };
    let name = call.get_mut("name")?;
    *name = format!("{}{end}", name.as_str()?).into();
    Some(())
}

fn common_prefix<'a>(a: &'a str, b: &str) -> &'a str {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
    &a[..same.map(|(c, _)| c.len_utf8()).sum()]
}

/// Characters that mark a beginning and an end.
pub(super) type Marks = [char; 2];

/// Noncharacters of Unicode, which texts do not contain.
const NO_TEXT: RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// Two characters that the text does not contain.
fn unused(text: &str) -> Option<Marks> {
    let mut unused = NO_TEXT.filter(|mark| !text.contains(*mark));
    Some([unused.next()?, unused.next()?])
}

/// Puts marks around the text, inside the white space that templates strip.
fn around(text: &str, [start, end]: Marks) -> String {
    let core = text.trim();
    if core.is_empty() {
        return format!("{start}{end}{text}");
    }
    let before = text.len() - text.trim_start().len();
    format!("{}{start}{core}{end}{}", &text[..before], &text[before + core.len()..])
}

/// Text without marks, and the outermost ranges between marks. `None` if a mark has no partner.
fn spans_between(marked: &str, [start, end]: Marks) -> Option<(String, Vec<Range<usize>>)> {
    let (mut plain, mut spans, mut open) = (String::new(), vec![], vec![]);
    for c in marked.chars() {
        if c == start {
            open.push(plain.len());
        } else if c == end {
            let start = open.pop()?;
            spans.extend(open.is_empty().then_some(start..plain.len()));
        } else {
            plain.push(c);
        }
    }
    open.is_empty().then_some((plain, spans))
}

/// Text with the positions of its marks.
struct Marked {
    text: String,
    /// `None` if the template dropped this mark.
    start: Option<usize>,
    end: usize,
}

impl Marked {
    /// Reads a text with one end mark and at most one begin mark before it. `None` for other texts.
    fn read(marked: &str, [start, end]: Marks) -> Option<Self> {
        let (before, after) = marked.split_once(end)?;
        if after.contains([start, end]) {
            return None;
        }
        let (first, last) = before.split_once(start).unwrap_or(("", before));
        if last.contains(start) {
            return None;
        }
        let start = before.contains(start).then_some(first.len());
        Some(Self { text: format!("{first}{last}{after}"), start, end: first.len() + last.len() })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::{MANY, Rendered};
    use crate::{ChatTemplate, Message, Tokenizer};

    /// For all test templates, the turns found by the surroundings of the first turn equal the
    /// turns found one by one. Some texts end in white space, look like marks of turns, are empty,
    /// or repeat.
    #[test]
    fn many_turns_are_found_as_few_are() {
        let vectors = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
        let tokenizer = Tokenizer::from_file(vectors.join("tokenizer.json")).unwrap();
        let texts =
            ["yes", " no\n", "assistant", "", "a\n\nb", "<|im_end|>", "yes", "1. one", "\u{4e2d}\u{6587}", "user:"];
        let message = |i: usize| {
            let role = if i.is_multiple_of(2) { "user" } else { "assistant" };
            Message::new(role, texts[(i * 7 + i / 10) % texts.len()])
        };
        let messages: Vec<_> = (0..6 * MANY).map(message).collect();
        let mut compared = 0;
        for file in fs::read_dir(vectors.join("chat")).unwrap() {
            let source = fs::read_to_string(file.unwrap().path()).unwrap();
            let tokens = [("bos_token", "<|begin_of_text|>"), ("eos_token", "<|end_of_text|>")];
            let template = ChatTemplate::new(&source, tokens).unwrap();
            let Ok(text) = template.render(&messages, false) else { continue };
            let (ids, ranges) = tokenizer.encode_with_ranges(&text).unwrap();
            let specials = ids.iter().zip(&ranges).filter(|(id, _)| tokenizer.is_special(**id));
            let specials: Vec<_> = specials.map(|(_, range)| range.clone()).collect();
            let conversation = Rendered {
                template: &template,
                tokenizer: &tokenizer,
                messages: &messages,
                text: &text,
                specials: &specials,
            };
            let find = |many| conversation.turns(many).ok();
            let one_by_one = find(usize::MAX);
            assert_eq!(find(MANY), one_by_one, "{source}");
            let turns: Vec<usize> = (1..messages.len()).step_by(2).collect();
            let alike = conversation.alike(&turns).map_or(0, |alike| alike.iter().flatten().count());
            compared += usize::from(alike > turns.len() / 3 && one_by_one.is_some());
        }
        assert!(compared >= 5, "only {compared} templates have turns that are alike");
    }
}
